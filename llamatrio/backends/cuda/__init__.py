"""The CUDA backend: kernels compiled for the device at hand by NVRTC, launched through cuda.core."""
