"""What can be seen of a CUDA build of torch without a GPU.

A CUDA build imports where there is no driver, and has the symbols, the fake kernels and the lazy
initialisation that a build for CPUs has not. `make cuda-symbols` makes an environment with one in
build/cuda-symbols (6 GB, a few minutes; `make clean` removes it) and runs the tests of this folder
there. CI does not: without CUDA in torch nothing here is collected. No kernel is run: what these
tests say of a GPU is that we ask torch for things it has, and that nothing wakes the driver early.
"""
