"""Compiled kernels for CPUs (numba): matrix products, attention, element-wise operations, drawing tokens.

`linear` chooses between these kernels, oneDNN and plain torch, and works without numba; everything else is loaded
only where kernels can be compiled. `tile` is the inner loop that the products share: start there. `formats` and
`widen` turn weights from the format of their file into float32.
"""
