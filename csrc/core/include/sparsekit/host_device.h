// Functions for both sides: the CPU engine and the device kernels.
#pragma once

#ifdef __CUDACC__
#define SPARSEKIT_HOST_DEVICE __host__ __device__
#else
#define SPARSEKIT_HOST_DEVICE
#endif
