// Stands in for the CUDA driver: provides the virtual memory functions that cuda/device_room.cu
// uses for rooms. A kernel that accesses unmapped addresses crashes the process.
#pragma once

namespace sparsekit::simt::host {

// Returns the stand-in for a driver function, or null.
void* driver_function(const char* name);

}  // namespace sparsekit::simt::host
