"""Measures the kernels' tiles on the present GPU for what a model will ask of them, and XLA's own code beside them:

    python scripts/tune.py --model llama-8b --weights int4

writes ``pallas_kernels/tuned/<device kind>.json``, which dispatch reads. XLA's code stays where it is the fastest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, without being installed

from jaxsqueeze.bench import tune_command

parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
tune_command.add_arguments(parser)
sys.exit(tune_command.run(parser.parse_args()))
