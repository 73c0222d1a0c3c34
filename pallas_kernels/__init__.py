"""Weight formats, and a transformer's kernels for CPU, GPU and TPU."""
