// Which tier this machine can run: CPUID for the instructions, XGETBV for the registers that the system saves.
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <string>

#ifdef TRILOBITE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(TRILOBITE_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(TRILOBITE_ARM)
#include <sys/sysctl.h>
#endif

namespace trilobite {

extern const Tier tier_scalar;
#ifdef TRILOBITE_X86
extern const Tier tier_avx2, tier_avx_vnni, tier_avx512, tier_avx512_vnni, tier_avx512_gfni, tier_avx512_bf16, tier_amx;
#endif
#ifdef TRILOBITE_ARM
extern const Tier tier_neon, tier_neon_i8mm;
#endif

namespace {

// Worst first: a cap is a place in this list, on every architecture.
constexpr const char *NAMES[] = {"scalar", "neon",        "neon_i8mm",   "avx2",        "avx_vnni",
                                 "avx512", "avx512_vnni", "avx512_gfni", "avx512_bf16", "amx"};
constexpr int MOST_TIERS = 10;

// A tier and what this machine lacks of what it needs; nothing: NULL first.
struct Choice {
  const Tier *tier;
  const char *lacks[8];
};

#ifdef TRILOBITE_X86
struct Feature {
  const char *name;
  bool present;
};

struct Cpu {
  uint32_t ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, eax7 = 0;  // eax7: of the second page
  uint64_t saved = 0;                                         // XCR0

  Cpu() {
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) ecx1 = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
      ebx7 = b, ecx7 = c, edx7 = d;
      if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) eax7 = a;
    }
    if (!(ecx1 >> 27 & 1)) return;  // OSXSAVE
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    saved = (uint64_t)high << 32 | low;
  }
  bool saves(uint64_t mask) const { return (saved & mask) == mask; }
  // Linux hands out the tile registers per process, on request.
  static bool permitted() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
};

// Best first, the last one without needs.
int choices(Choice *out) {
  const Cpu c;
  const auto bit = [](uint32_t word, int i) { return (word >> i & 1) != 0; };
  const Feature avx2[] = {{"avx2", bit(c.ebx7, 5)},
                          {"fma", bit(c.ecx1, 12)},
                          {"f16c", bit(c.ecx1, 29)},
                          {"bmi2", bit(c.ebx7, 8)},
                          {"256-bit registers saved by the system", c.saves(0x6)}};
#ifdef TRILOBITE_EVEX
  const Feature avx_vnni[] = {{"avx512vl", bit(c.ebx7, 31)}, {"avx512_vnni", bit(c.ecx7, 11)}};
#else
  const Feature avx_vnni[] = {{"avx_vnni", bit(c.eax7, 4)}};
#endif
  const Feature avx512[] = {{"avx512f", bit(c.ebx7, 16)},
                            {"avx512dq", bit(c.ebx7, 17)},
                            {"avx512bw", bit(c.ebx7, 30)},
                            {"avx512vl", bit(c.ebx7, 31)},
                            {"512-bit registers saved by the system", c.saves(0xe6)}};
  const Feature vnni[] = {{"avx512_vnni", bit(c.ecx7, 11)}};
  const Feature gfni[] = {{"gfni", bit(c.ecx7, 8)}, {"avx512_vbmi", bit(c.ecx7, 1)}};
  const Feature bf16[] = {{"avx512_bf16", bit(c.eax7, 5)}};
  const bool tiles = bit(c.edx7, 24) && bit(c.edx7, 25) && c.saves(0x60000);
  const Feature amx[] = {{"amx_tile", bit(c.edx7, 24)},
                         {"amx_int8", bit(c.edx7, 25)},
                         {"amx_bf16", bit(c.edx7, 22)},
                         {"tiles permitted by the system", tiles && Cpu::permitted()}};
  int n = 0;
  const auto add = [&](const Tier *tier, auto &...needs) {
    Choice &choice = out[n++] = {tier, {}};
    int lacks = 0;
    const auto check = [&](const Feature &f) {
      if (!f.present && lacks < 7) choice.lacks[lacks++] = f.name;
    };
    const auto all = [&](const auto &features) {
      for (const Feature &f : features) check(f);
    };
    (all(needs), ...);
  };
  add(&tier_amx, avx2, avx512, vnni, gfni, bf16, amx);
  add(&tier_avx512_bf16, avx2, avx512, vnni, gfni, bf16);
  add(&tier_avx512_gfni, avx2, avx512, vnni, gfni);
  add(&tier_avx512_vnni, avx2, avx512, vnni);
  add(&tier_avx512, avx2, avx512);
  add(&tier_avx_vnni, avx2, avx_vnni);
  add(&tier_avx2, avx2);
  out[n++] = {&tier_scalar, {}};
  return n;
}
#elif defined(TRILOBITE_ARM)
#ifdef __linux__
bool dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }    // HWCAP_ASIMDDP
bool byte_matrices() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#else
bool dot_products() { return true; }  // Apple's processors
bool byte_matrices() {
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0 && found;
}
#endif

int choices(Choice *out) {
  const char *dots = dot_products() ? nullptr : "asimddp", *matrices = byte_matrices() ? nullptr : "i8mm";
  out[0] = {&tier_neon_i8mm, {dots ? dots : matrices, dots ? matrices : nullptr}};
  out[1] = {&tier_neon, {dots}};
  out[2] = {&tier_scalar, {}};
  return 3;
}
#else
int choices(Choice *out) {
  out[0] = {&tier_scalar, {}};
  return 1;
}
#endif

int rank_of(const char *name) {
  for (int i = 0; i < MOST_TIERS; i++)
    if (strcmp(NAMES[i], name) == 0) return i;
  return -1;
}

std::atomic<const Tier *> g_tier{nullptr};

}  // namespace

bool choose_tier(const char *cap) {
  const int top = cap ? rank_of(cap) : MOST_TIERS - 1;
  if (top < 0) return false;
  Choice found[MOST_TIERS];
  const int n = choices(found);
  for (int i = 0; i < n; i++)
    if (found[i].lacks[0] == nullptr && rank_of(found[i].tier->name) <= top) {
      g_tier = found[i].tier;
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

std::string better_tier() {
  Choice found[MOST_TIERS];
  const int n = choices(found), now = rank_of(tier().name);
  const Choice *next = nullptr;  // that this machine has; else the first one that it has not
  for (int i = n - 1; i >= 0; i--) {
    const Choice &c = found[i];
    if (rank_of(c.tier->name) <= now || (next && c.lacks[0])) continue;
    next = &c;
    if (!c.lacks[0]) break;
  }
  if (!next) return "";
  std::string why =
      std::string(next->tier->name) + (next->lacks[0] ? " needs " : " is there, but TRILOBITE_ISA caps it");
  for (int l = 0; l < 8 && next->lacks[l]; l++) why += std::string(l ? ", " : "") + next->lacks[l];
  return why;
}

}  // namespace trilobite
