#include "device_context.h"

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#include "sparsekit/device_memory.h"

namespace sparsekit::ops {
namespace {

bool checks_wanted() {
#if defined(SPARSEKIT_ENGINE_SIMT)
  return true;  // checks cost no wait: the host runner always waits for each kernel
#else
  const char* set = std::getenv("SPARSEKIT_CHECKED");
  return set != nullptr && *set != '\0' && std::string(set) != "0";
#endif
}

std::atomic<bool> checks_on{checks_wanted()};

struct ErrorInfo {
  const char* op;
  const char* argument;
};
constexpr ErrorInfo kErrors[] = {
#define SPARSEKIT_INFO(name, op, argument) {op, argument},
    SPARSEKIT_DEVICE_ERRORS(SPARSEKIT_INFO)
#undef SPARSEKIT_INFO
};

// Returns the message for the first error in these words, or an empty string.
std::string message_of(const int64_t* words) {
  for (int64_t kind = 0; kind < kNumErrors; ++kind) {
    if (words[kind] == cuda::kNoPosition) continue;
    const int64_t table = cuda::table_of_position(words[kind]);
    const int64_t position = cuda::position_in_table(words[kind]);
    const auto& [op, argument] = kErrors[kind];
    if (kind == static_cast<int64_t>(DeviceError::kGroupRefused)) {
      const std::string what = position == 0 ? "is damaged" : message("was full");
      return message(op, ": table ", table, " ", what, " in an earlier call on this device, and ",
                     position == 0 ? std::string("its") : std::to_string(position),
                     " new keys were not inserted");
    }
    if (kind == static_cast<int64_t>(DeviceError::kGroupMaxKeys)) {
      return message(op, ": in an earlier call on this device, a rank owned more keys of table ",
                     position, " than max_keys_per_rank, and the keys beyond it were left out");
    }
    return message(op, table == 0 ? "" : message(": table ", table), ": ", argument, "[", position,
                   "] was out of range in an earlier call on this device; it was left out. Set "
                   "SPARSEKIT_CHECKED=1 to have the call itself raise");
  }
  return {};
}

// Returns the error words of a device. They are allocated at the first use and never freed.
int64_t* error_words_of(const Tensor& on, void* stream) {
  static std::mutex mutex;
  static auto* devices = new std::map<int32_t, Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  const int32_t device = on.get_device_index();
  auto found = devices->find(device);
  if (found == devices->end()) {
    if (cuda::is_capturing(stream)) {
      throw std::runtime_error(
          "sparsekit: the first op on a device cannot be captured in a graph; run one before");
    }
    Tensor words = torch::stable::new_empty(on, {kNumErrors}, ScalarType::Long);
    cuda::fill_bytes(words.mutable_data_ptr(), cuda::kNoPositionByte,
                     kNumErrors * static_cast<int64_t>(sizeof(int64_t)), stream);
    // Wait, so that the words are also ready for other streams.
    int64_t word = 0;
    const cuda::Piece piece{&word, words.const_data_ptr(), sizeof word};
    cuda::read_back(&piece, 1, stream);
    found = devices->emplace(device, words).first;
  }
  return mutable_data<int64_t>(found->second);
}

}  // namespace

#if defined(SPARSEKIT_ENGINE_CUDA)

struct DeviceContext::Guard {
  torch::stable::accelerator::DeviceGuard guard;
};

namespace {

// Returns torch's current stream. Looks torch's function up at run time: if it were linked
// directly, this library could not be loaded with a CPU build of torch.
void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    if (symbol == nullptr) {
      throw std::runtime_error("sparsekit: this torch has no aoti_torch_get_current_cuda_stream");
    }
    return reinterpret_cast<Function>(symbol);
  }();
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("sparsekit: torch has no current stream");
  return stream;
}

}  // namespace

DeviceContext::DeviceContext(const Tensor& on)
    : guard_(new Guard{torch::stable::accelerator::DeviceGuard(on.get_device_index())}),
      on_(on),
      stream_(current_stream(on.get_device_index())),
      error_words_(error_words_of(on, stream_)) {
  begin();
}

#else

struct DeviceContext::Guard {};

DeviceContext::DeviceContext(const Tensor& on)
    : on_(on), error_words_(error_words_of(on, nullptr)) {
  begin();
}

#endif

DeviceContext::~DeviceContext() = default;

int64_t* DeviceContext::error_word(DeviceError error) const {
  return error_words_ + static_cast<int64_t>(error);
}

// Raises earlier errors: with checks on, an error found after a call must have come from that call.
void DeviceContext::begin() const {
  if (!checking()) return;
  int64_t positions[kNumErrors];
  const cuda::Piece piece{positions, error_words_, sizeof positions};
  cuda::read_back(&piece, 1, stream_);
  raise_left_over(positions);
}

bool DeviceContext::capturing() const {
  return cuda::is_capturing(stream_);
}

bool DeviceContext::checking() const {
  return checks_on && !capturing();
}

int64_t DeviceContext::error_position(DeviceError error, int64_t limit) const {
  if (!checking()) return -1;
  int64_t positions[kNumErrors];
  const cuda::Piece piece{positions, error_words_, sizeof positions};
  cuda::read_back(&piece, 1, stream_);
  const int64_t position = positions[static_cast<int64_t>(error)];
  if (position == cuda::kNoPosition) return -1;
  // A position beyond the limit is not from this call: another stream on the device must have
  // reported an error.
  if (position >= limit) raise_left_over(positions);
  cuda::fill_bytes(error_word(error), cuda::kNoPositionByte, sizeof position, stream_);
  return position;
}

int64_t DeviceContext::value(const Tensor& words, int64_t i) const {
  const auto read = [&](auto value) {
    const cuda::Piece piece{&value, data<decltype(value)>(words) + i, sizeof value};
    cuda::read_back(&piece, 1, stream_);
    return int64_t{value};
  };
  switch (words.scalar_type()) {
    case ScalarType::Short:
      return read(int16_t{});
    case ScalarType::Int:
      return read(int32_t{});
    default:
      return read(int64_t{});
  }
}

namespace {

// Returns true if later calls may use the memory that this call fills.
bool can_keep(bool capturing) {
#if defined(SPARSEKIT_ENGINE_SIMT)
  if (simt::host::only_plans()) return false;
#endif
  return !capturing;
}

// Each stream has its own copies. A copy is made before the first kernel that reads it runs. Once a
// copy is dropped, its memory is reused only after the last such kernel. Stream order ensures both
// without a wait. A graph is captured on a different stream than the previous step used, but runs
// after that step. The graph keeps the copies that it uses. A copy that is first needed while a
// graph is captured belongs to the graph, and each replay makes this copy again.
Tensor copy_on(const Tensor& on, void* stream, const void* bytes, int64_t count) {
  struct Copy {
    int32_t device;
    void* stream;
    std::vector<char> bytes;
    Tensor tensor;
    bool in_graph;
  };
  constexpr int64_t kMostCopies = 32;  // not counting those that graphs use
  static std::mutex mutex;
  static auto* copies = new std::list<Copy>;  // latest copy first
  const std::lock_guard<std::mutex> lock(mutex);
  const int32_t device = on.get_device_index();
  const bool capturing = cuda::is_capturing(stream);
  const auto found = std::find_if(copies->begin(), copies->end(), [&](const Copy& copy) {
    return copy.device == device && (copy.stream == stream || capturing) &&
           copy.bytes.size() == static_cast<size_t>(count) &&
           std::memcmp(copy.bytes.data(), bytes, copy.bytes.size()) == 0;
  });
  if (found != copies->end()) {
    found->in_graph |= capturing;
    copies->splice(copies->begin(), *copies, found);
    return found->tensor;
  }
  Tensor tensor = new_output(on, {(count + 15) / 16 * 16}, ScalarType::Byte);
  cuda::copy_to_device(tensor.mutable_data_ptr(), bytes, count, stream);
  if (!can_keep(capturing)) return tensor;
  const auto may_go = [](const Copy& copy) { return !copy.in_graph; };
  if (std::count_if(copies->begin(), copies->end(), may_go) >= kMostCopies) {
    const auto oldest = std::find_if(copies->rbegin(), copies->rend(), may_go);
    copies->erase(std::next(oldest).base());
  }
  const auto* begin = static_cast<const char*>(bytes);
  copies->push_front({device, stream, std::vector<char>(begin, begin + count), tensor, false});
  return tensor;
}

}  // namespace

const void* DeviceContext::cached_copy(const void* bytes, int64_t count) const {
  const Tensor& copy = copies_.emplace_back(copy_on(on_, stream_, bytes, count));
  return copy.const_data_ptr();
}

cuda::KeepOnDevice DeviceContext::keeper() const {
  return [this](const void* host, int64_t bytes) { return cached_copy(host, bytes); };
}

void DeviceContext::read(const int64_t* device, int64_t count, int64_t* host) const {
  if (cuda::is_capturing(stream_)) {
    throw std::runtime_error(
        "sparsekit: an op whose result has a size that only the device knows cannot be captured in "
        "a graph");
  }
  int64_t positions[kNumErrors];
  const cuda::Piece pieces[] = {{host, device, count * static_cast<int64_t>(sizeof(int64_t))},
                                {positions, error_words_, sizeof positions}};
  cuda::read_back(pieces, 2, stream_);
  raise_left_over(positions);
}

// Throws the error reported by an earlier call, if there is one.
void DeviceContext::raise_left_over(const int64_t* positions) const {
  const std::string found = message_of(positions);
  if (found.empty()) return;
  cuda::fill_bytes(error_words_, cuda::kNoPositionByte, kNumErrors * sizeof(int64_t), stream_);
  throw std::out_of_range(found);
}

}  // namespace sparsekit::ops

// Turns checks on or off. Returns whether they were on before. sparsekit.checked calls this
// function through ctypes, since an op without tensors could not be dispatched to an engine.
extern "C" __attribute__((visibility("default"))) int sparsekit_set_checked(int on) {
  return sparsekit::ops::checks_on.exchange(on != 0);
}

// Returns 1 if checks are on, otherwise 0.
extern "C" __attribute__((visibility("default"))) int sparsekit_checks_on() {
  return sparsekit::ops::checks_on;
}

// Returns the number of error words. An op's `report` begins with these words.
extern "C" __attribute__((visibility("default"))) int64_t sparsekit_num_errors() {
  return sparsekit::ops::kNumErrors;
}

// Returns the message for the first error in a report's words, or null if there is no error. The
// string is valid until the next call on this thread.
extern "C" __attribute__((visibility("default"))) const char* sparsekit_reported_error(
    const int64_t* words) {
  thread_local std::string found;
  found = sparsekit::ops::message_of(words);
  return found.empty() ? nullptr : found.c_str();
}

// Returns the number of times that ops have waited for a device. torch.cuda.set_sync_debug_mode
// does not see these waits, since they bypass torch.
extern "C" __attribute__((visibility("default"))) int64_t sparsekit_num_waits() {
  return sparsekit::cuda::num_waits();
}
