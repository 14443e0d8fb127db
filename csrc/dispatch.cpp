// Which tier this machine can run: CPUID for the instructions, XGETBV for the registers that the system saves.
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>

#ifdef TRILOBITE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(TRILOBITE_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace trilobite {

extern const Tier tier_scalar;
#ifdef TRILOBITE_X86
extern const Tier tier_avx2, tier_avx512, tier_vnni, tier_amx;
#endif
#ifdef TRILOBITE_ARM
extern const Tier tier_neon;
#endif

namespace {

#ifdef TRILOBITE_X86
struct Cpu {
  uint32_t ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0;
  uint64_t saved = 0;  // XCR0

  Cpu() {
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) ecx1 = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) ebx7 = b, ecx7 = c, edx7 = d;
    if (!(ecx1 >> 27 & 1)) return;  // OSXSAVE
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    saved = (uint64_t)high << 32 | low;
  }
  bool saves(uint64_t mask) const { return (saved & mask) == mask; }
  bool avx2() const {
    const bool fma = ecx1 >> 12 & 1, f16c = ecx1 >> 29 & 1, avx2 = ebx7 >> 5 & 1, bmi2 = ebx7 >> 8 & 1;
    return fma && f16c && avx2 && bmi2 && saves(0x6);
  }
  bool avx512() const {
    const bool f = ebx7 >> 16 & 1, dq = ebx7 >> 17 & 1, bw = ebx7 >> 30 & 1, vl = ebx7 >> 31 & 1;
    return avx2() && f && dq && bw && vl && saves(0xe6);
  }
  // VNNI, VBMI, GFNI: the processors that have the first two have the third.
  bool vnni() const { return avx512() && (ecx7 >> 11 & 1) && (ecx7 >> 1 & 1) && (ecx7 >> 8 & 1); }
  bool amx() const {
    return vnni() && (edx7 >> 22 & 1) && (edx7 >> 24 & 1) && (edx7 >> 25 & 1) && saves(0x60000) && permitted();
  }
  // Linux hands out the tile registers per process, on request.
  static bool permitted() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
};
#endif

#ifdef TRILOBITE_ARM
bool dot_products() {
#ifdef __linux__
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return true;  // Apple's processors
#endif
}
#endif

// Best first.
int available(const Tier *out[5]) {
  int n = 0;
#ifdef TRILOBITE_X86
  const Cpu cpu;
  if (cpu.amx()) out[n++] = &tier_amx;
  if (cpu.vnni()) out[n++] = &tier_vnni;
  if (cpu.avx512()) out[n++] = &tier_avx512;
  if (cpu.avx2()) out[n++] = &tier_avx2;
#endif
#ifdef TRILOBITE_ARM
  if (dot_products()) out[n++] = &tier_neon;
#endif
  out[n++] = &tier_scalar;
  return n;
}

constexpr const char *NAMES[] = {"scalar", "neon", "avx2", "avx512", "avx512_vnni", "amx"};

int rank_of(const char *name) {
  for (int i = 0; i < 6; i++)
    if (strcmp(NAMES[i], name) == 0) return i;
  return -1;
}

std::atomic<const Tier *> g_tier{nullptr};

}  // namespace

bool choose_tier(const char *cap) {
  const int top = cap ? rank_of(cap) : 5;
  if (top < 0) return false;
  const Tier *tiers[5];
  const int n = available(tiers);
  for (int i = 0; i < n; i++)
    if (rank_of(tiers[i]->name) <= top) {
      g_tier = tiers[i];
      return true;
    }
  return false;
}

const Tier &tier() {
  const Tier *t = g_tier.load(std::memory_order_acquire);
  if (t == nullptr) {
    if (!choose_tier(getenv("TRILOBITE_ISA"))) choose_tier(nullptr);
    t = g_tier.load();
  }
  return *t;
}

}  // namespace trilobite
