"""``jaxsqueeze bench`` from a checkout."""

import sys

from jaxsqueeze.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
