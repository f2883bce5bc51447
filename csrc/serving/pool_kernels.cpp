#include "serving/pool_kernels.h"

#include <cstdlib>
#include <cstring>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

namespace sparsekit::serving {

int choose_kernels(const PoolKernels** kernels) {
  struct Choice {
    const char* name;
    const PoolKernels* kernels;
    bool supported;
  };
  // In order of preference.
  const Choice choices[] = {
#ifdef SPARSEKIT_SERVING_X86
      {"avx512", &avx512::kernels, avx512::is_supported()},
      {"avx2", &avx2::kernels, avx2::is_supported()},
#endif
      {"generic", &generic::kernels, true},
  };
  const char* most = std::getenv("SPARSEKIT_SERVING_ISA");
  bool below = most == nullptr || *most == '\0';
  for (const Choice& choice : choices) {
    below = below || std::strcmp(choice.name, most) == 0;
    if (below && choice.supported) {
      *kernels = choice.kernels;
      return SK_OK;
    }
  }
  return fail(SK_BAD_ARGUMENT,
              "SPARSEKIT_SERVING_ISA must be generic, avx2 or avx512, but is \"%s\"", most);
}

}  // namespace sparsekit::serving
