// Rooms: ranges of device addresses with memory mapped only at the start. A growing tensor is
// placed in a room, and so keeps its address. Uses the CUDA driver's virtual memory functions, and
// hands tensors to Python via DLPack. sparsekit/device_rooms.py calls the functions at the end.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "sparsekit/device_memory.h"

#ifdef __CUDACC__
#include <cuda.h>
#include <dlfcn.h>
#else
#include "simt/driver.h"
#endif

namespace sparsekit::cuda {
namespace {

// Copies of the driver's types, since the host runner is built without CUDA's headers.
using Address = unsigned long long;
using Handle = unsigned long long;
struct Location {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
};
struct Properties {
  int type = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED, the only one
  int handle_types = 0;  // CU_MEM_HANDLE_TYPE_NONE
  Location location;
  void* unused = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};
#ifdef __CUDACC__
static_assert(sizeof(Address) == sizeof(CUdeviceptr));
static_assert(sizeof(Handle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(Properties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(Properties, location) == offsetof(CUmemAllocationProp, location));
static_assert(sizeof(Access) == sizeof(CUmemAccessDesc));
static_assert(CU_MEM_LOCATION_TYPE_DEVICE == 1 && CU_MEM_ALLOCATION_TYPE_PINNED == 1);
static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3 && CU_MEM_HANDLE_TYPE_NONE == 0);
#endif

// Returns a driver function. The library is opened here rather than linked, so that sparsekit also
// loads on a machine without a driver.
void* driver_function(const char* name) {
#ifdef __CUDACC__
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  void* const symbol = library == nullptr ? nullptr : dlsym(library, name);
#else
  void* const symbol = simt::host::driver_function(name);
#endif
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
  return symbol;
}

struct Driver {
#define SPARSEKIT_DRIVER(member, name, ...) \
  int (*member)(__VA_ARGS__) = reinterpret_cast<int (*)(__VA_ARGS__)>(driver_function(name))
  SPARSEKIT_DRIVER(error_string, "cuGetErrorString", int, const char**);
  SPARSEKIT_DRIVER(device_get, "cuDeviceGet", int*, int);
  SPARSEKIT_DRIVER(retain, "cuDevicePrimaryCtxRetain", void**, int);
  SPARSEKIT_DRIVER(let_go, "cuDevicePrimaryCtxRelease_v2", int);
  SPARSEKIT_DRIVER(push, "cuCtxPushCurrent_v2", void*);
  SPARSEKIT_DRIVER(pop, "cuCtxPopCurrent_v2", void**);
  SPARSEKIT_DRIVER(synchronize, "cuCtxSynchronize");
  SPARSEKIT_DRIVER(granularity, "cuMemGetAllocationGranularity", size_t*, const Properties*, int);
  SPARSEKIT_DRIVER(reserve, "cuMemAddressReserve", Address*, size_t, size_t, Address,
                   unsigned long long);
  SPARSEKIT_DRIVER(free, "cuMemAddressFree", Address, size_t);
  SPARSEKIT_DRIVER(create, "cuMemCreate", Handle*, size_t, const Properties*, unsigned long long);
  SPARSEKIT_DRIVER(release, "cuMemRelease", Handle);
  SPARSEKIT_DRIVER(map, "cuMemMap", Address, size_t, size_t, Handle, unsigned long long);
  SPARSEKIT_DRIVER(unmap, "cuMemUnmap", Address, size_t);
  SPARSEKIT_DRIVER(set_access, "cuMemSetAccess", Address, size_t, const Access*, size_t);
#undef SPARSEKIT_DRIVER
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check(int result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw std::runtime_error(std::string("the CUDA driver could not ") + what + ": " +
                           (text == nullptr ? std::to_string(result) : text));
}

// Makes torch's context for a device current as long as this object exists.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(driver().device_get(&device_, device), "find the device");
    void* context = nullptr;
    check(driver().retain(&context, device_), "use the device");
    const int result = driver().push(context);
    if (result != 0) driver().let_go(device_);
    check(result, "use the device");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    void* context = nullptr;
    driver().pop(&context);
    driver().let_go(device_);
  }

 private:
  int device_ = 0;
};

struct Room {
  int device;
  size_t unit;      // memory sizes are multiples of this
  size_t reserved;  // size of the address range
  size_t committed = 0;
  std::vector<size_t> pieces;  // sizes of the parts, one for each mapping
  int tensors = 0;             // number of tensors in the room
};

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

Properties properties_of(int device) {
  Properties properties;
  properties.location.device = device;
  return properties;
}

// The mutex and the map of all rooms in use, keyed by address. They are never destroyed, since
// tensors may outlive all other objects.
std::mutex& mutex() {
  static auto* one = new std::mutex;
  return *one;
}
std::map<Address, Room>& rooms() {
  static auto* all = new std::map<Address, Room>;
  return *all;
}

Address reserve(size_t bytes, int device) {
  const OnDevice current(device);
  const Properties properties = properties_of(device);
  Room room{device, 0, 0, 0, {}, 0};
  check(driver().granularity(&room.unit, &properties, 0), "tell the size of its pages");
  room.reserved = round_up(std::max<size_t>(bytes, 1), room.unit);
  Address address = 0;
  check(driver().reserve(&address, room.reserved, 0, 0, 0), "reserve addresses");
  const std::lock_guard<std::mutex> lock(mutex());
  rooms().emplace(address, std::move(room));
  return address;
}

// Maps new memory after a room's existing memory.
void extend(Address address, Room& room, size_t size) {
  const Driver& call = driver();
  const Properties properties = properties_of(room.device);
  const Address begin = address + room.committed;
  Access access;
  access.location.device = room.device;
  room.pieces.reserve(room.pieces.size() + 1);
  Handle handle = 0;
  check(call.create(&handle, size, &properties, 0), "allocate memory");
  const int mapped = call.map(begin, size, 0, handle, 0);
  call.release(handle);  // from here on, the mapping keeps the memory
  check(mapped, "map memory");
  const int accessible = call.set_access(begin, size, &access, 1);
  if (accessible != 0) call.unmap(begin, size);
  check(accessible, "make memory accessible");
  room.pieces.push_back(size);
  room.committed += size;
}

Room& room_at(Address address) {
  const auto found = rooms().find(address);
  if (found == rooms().end()) throw std::runtime_error("there is no room at this address");
  return found->second;
}

void commit(Address address, size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex());
  Room& room = room_at(address);
  if (bytes > room.reserved) throw std::runtime_error("the room has fewer bytes");
  if (bytes <= room.committed) return;
  if (is_capturing(stream)) {
    throw std::runtime_error("memory cannot be added while a graph is captured");
  }
  const OnDevice current(room.device);
  const Address begin = address + room.committed;
  const size_t size = round_up(bytes, room.unit) - room.committed;
  extend(address, room, size);
  fill_bytes(reinterpret_cast<void*>(begin), 0, static_cast<int64_t>(size), stream);
}

// Frees a room. Waits for the device first: unmapping does not wait, and kernels may still be using
// the room. If the wait fails, leaks the room: when the process ends, the driver may already be
// gone.
void free_room(Address address, const Room& room) {
  try {
    const OnDevice current(room.device);
    if (driver().synchronize() != 0) return;
    Address piece = address;
    for (const size_t size : room.pieces) {
      driver().unmap(piece, size);
      piece += size;
    }
    driver().free(address, room.reserved);
  } catch (const std::exception&) {
  }
}

// Removes one tensor from a room's count, and frees the room if it was the last.
void drop(Address address) {
  std::unique_lock<std::mutex> lock(mutex());
  const auto found = rooms().find(address);
  if (--found->second.tensors > 0) return;
  const Room room = std::move(found->second);
  rooms().erase(found);
  lock.unlock();
  free_room(address, room);
}

// A byte tensor in DLPack's unversioned format; torch.from_dlpack() takes ownership of it.
struct DlTensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t type_code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t offset;
};
struct Managed {
  DlTensor tensor;
  void* context;
  void (*deleter)(Managed*);
  int64_t size, stride;
};
#ifdef __CUDACC__
constexpr int32_t kDeviceType = 2;  // kDLCUDA
#else
constexpr int32_t kDeviceType = 1;  // kDLCPU
#endif

Managed* tensor_at(Address address, int64_t bytes) {
  auto* made = new Managed{};
  {
    const std::lock_guard<std::mutex> lock(mutex());
    Room& room = room_at(address);
    ++room.tensors;
    made->tensor.device = kDeviceType == 1 ? 0 : room.device;
  }
  made->tensor.data = reinterpret_cast<void*>(address);
  made->tensor.device_type = kDeviceType;
  made->tensor.dimensions = 1;
  made->tensor.type_code = 1;  // kDLUInt
  made->tensor.bits = 8;
  made->tensor.lanes = 1;
  made->size = bytes;
  made->stride = 1;
  made->tensor.shape = &made->size;
  made->tensor.strides = &made->stride;
  made->deleter = [](Managed* tensor) {
    drop(reinterpret_cast<Address>(tensor->tensor.data));
    delete tensor;
  };
  return made;
}

// Creates a room with memory for its first `first` bytes; returns a tensor of the whole room.
Managed* new_room(int64_t bytes, int64_t first, int device, void* stream) {
  const Address address = reserve(static_cast<size_t>(bytes), device);
  Managed* const tensor = tensor_at(address, bytes);
  try {
    commit(address, static_cast<size_t>(first), stream);
  } catch (...) {
    tensor->deleter(tensor);
    throw;
  }
  return tensor;
}

// Calls a function. Returns its error message, valid until the thread's next call, or null if there
// is no error.
template <class Call>
const char* message_of(const Call& call) {
  thread_local std::string message;
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
}  // namespace sparsekit::cuda

#define SPARSEKIT_PUBLIC extern "C" __attribute__((visibility("default")))

// Reserves addresses for `bytes` bytes on a device, maps memory for the first `first` of them, like
// sparsekit_commit_room(), and sets `tensor` to a DLManagedTensor of all `bytes` bytes. Like the
// next two functions, returns an error message or null.
SPARSEKIT_PUBLIC const char* sparsekit_new_room(int64_t bytes, int64_t first, int device,
                                                void* stream, void** tensor) {
  using namespace sparsekit::cuda;
  return message_of([&] { *tensor = new_room(bytes, first, device, stream); });
}

// Sets `tensor` to a DLManagedTensor that has a room's first `bytes` bytes and keeps the room
// alive.
SPARSEKIT_PUBLIC const char* sparsekit_room_tensor(unsigned long long address, int64_t bytes,
                                                   void** tensor) {
  using namespace sparsekit::cuda;
  return message_of([&] { *tensor = tensor_at(address, bytes); });
}

// Maps memory for at least a room's first `bytes` bytes. New memory is zeroed in stream order.
SPARSEKIT_PUBLIC const char* sparsekit_commit_room(unsigned long long address, int64_t bytes,
                                                   void* stream) {
  using namespace sparsekit::cuda;
  return message_of([&] { commit(address, static_cast<size_t>(bytes), stream); });
}

// Returns how many bytes of a room are backed by memory, or -1 if no room begins at this address.
SPARSEKIT_PUBLIC int64_t sparsekit_committed(unsigned long long address) {
  using namespace sparsekit::cuda;
  const std::lock_guard<std::mutex> lock(mutex());
  const auto found = rooms().find(address);
  return found == rooms().end() ? -1 : static_cast<int64_t>(found->second.committed);
}
