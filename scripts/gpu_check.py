"""One look at a GPU: kernels right, kernels fast, whole models fast. From a checkout, in at most --minutes 8:

    python scripts/gpu_check.py --out FOLDER

Needs Python >= 3.11, jax with CUDA, triton, flax, numpy, jaxtyping and rich, and no network; this project need not be
installed. Packages that a machine lacks can be carried as wheels: install them with ``pip install --target
FOLDER --no-index --no-deps *.whl`` and put that folder on PYTHONPATH, which the processes started here take over.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxsqueeze.bench.gpu_check import command

parser = argparse.ArgumentParser(description=__doc__.split(" From")[0])
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args(), sys.argv[1:]))
