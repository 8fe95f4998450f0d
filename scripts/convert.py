"""``jaxsqueeze convert`` from a checkout."""

import sys

from jaxsqueeze.cli import main

sys.exit(main(["convert", *sys.argv[1:]]))
