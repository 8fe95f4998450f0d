"""Registers, spills, shared memory and occupancy of every Triton kernel, compiled without a GPU: writes
``pallas_kernels/RESOURCES.md``, or checks that it is true and that no default tile spills."""

import argparse
import sys

from pallas_kernels.resource_table import update

if __name__ == "__main__":  # its worker processes import this file again
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    sys.exit(update(parser.parse_args().check))
