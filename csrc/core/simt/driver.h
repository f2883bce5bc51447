// Stands in for CUDA's driver: the functions for virtual memory, of which cuda/device_room.cu makes
// rooms. Addresses without memory cannot be accessed, so a kernel that does so ends the process.
#pragma once

namespace sparsekit::simt::host {

// Returns the stand-in for a function of the driver, or null.
void* driver_function(const char* name);

}  // namespace sparsekit::simt::host
