// Marks functions that both the CPU engine and device kernels call.
#pragma once

#ifdef __CUDACC__
#define SPARSEKIT_HOST_DEVICE __host__ __device__
#else
#define SPARSEKIT_HOST_DEVICE
#endif
