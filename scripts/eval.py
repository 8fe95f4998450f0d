"""``jaxsqueeze eval`` from a checkout."""

import sys

from jaxsqueeze.cli import main

sys.exit(main(["eval", *sys.argv[1:]]))
