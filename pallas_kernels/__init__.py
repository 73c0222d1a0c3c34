"""4-bit weight formats and the matrix kernels that read them, for CPU, GPU and TPU."""
