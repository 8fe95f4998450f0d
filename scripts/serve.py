"""``jaxsqueeze serve`` from a checkout."""

import sys

from jaxsqueeze.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
