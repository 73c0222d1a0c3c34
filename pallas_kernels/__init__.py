"""Weight formats, and the kernels of a transformer that read them, for CPU, GPU and TPU."""
