"""One look at a real GPU, of a few minutes: are the kernels right, how fast are they, how fast are whole models.

What is measured is a list of cases in four parts. Each part runs in a process of its own (worker.py), because a kernel
that goes wrong takes its process's CUDA context with it, and XLA_FLAGS are read once; supervisor.py starts them, starts
them again after what broke, and keeps to the time. Only pallas_kernels, the runner and what they need are imported:
jax, flax, numpy, jaxtyping, rich.
"""
