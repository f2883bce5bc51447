// Switches between stacks, without a system call on x86-64.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack and the stack pointer in *save, then continues on
// the stack whose pointer is `load`. The symbol is weak, since several files include this header.
extern "C" void sparsekit_simt_switch(void** save, void* load);
asm(R"(
.text
.weak sparsekit_simt_switch
.hidden sparsekit_simt_switch
.type sparsekit_simt_switch, @function
sparsekit_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sparsekit_simt_switch, .-sparsekit_simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace sparsekit::simt::host {

#if defined(__x86_64__)
class Context {
 public:
  // Prepares the context so that the first switch to it calls entry(), which must not return.
  void begin(char* stack, size_t size, void (*entry)()) {
    auto top = reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15};
    auto* words = reinterpret_cast<uintptr_t*>(top);
    // Store six registers, the address to continue at, and a null return address, which is 8 bytes
    // below a multiple of 16.
    for (int i = 1; i <= 8; ++i) words[-i] = 0;
    words[-2] = reinterpret_cast<uintptr_t>(entry);
    pointer_ = words - 8;
  }
  void switch_to(Context& other) { sparsekit_simt_switch(&pointer_, other.pointer_); }

 private:
  void* pointer_ = nullptr;
};
#else
class Context {
 public:
  void begin(char* stack, size_t size, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = size;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};
#endif

}  // namespace sparsekit::simt::host
