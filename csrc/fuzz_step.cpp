// Lists of nodes of a decoding step, each operand in memory of its own that is exactly as large as it says; then numbers of
// them are broken. What the check accepts must run, on every tier, without touching a byte beside.
#include "fuzz.h"

namespace fuzz {

StepCount g_steps{};

namespace {

using trilobite::size_of;

// Numbers at which products overflow, signs turn, shapes end.
int64_t hostile() {
  constexpr int64_t NUMBERS[] = {
      0, -1, 1, 2, 3, 7, INT64_MIN, INT64_MAX, (int64_t)1 << 31, (int64_t)1 << 40, (int64_t)1 << 62};
  return pick(0, 2) ? NUMBERS[pick(0, 10)] : (int64_t)g_random() >> pick(0, 63);
}

struct List {
  std::vector<Bytes> slots;
  std::vector<trilobite_step_node> nodes;
  Weight w;
  Layer layer;
  trilobite_experts_args experts{};
  trilobite_step_cache cache{};
  std::vector<int64_t> rows;

  trilobite_operand slot(int64_t bytes, int64_t dtype) {
    slots.push_back(Bytes(bytes));
    for (int64_t i = 0; i + 4 <= bytes; i += 4) {
      const float f = gaussian();
      memcpy(&slots.back()[i], &f, 4);
    }
    return {slots.back().data(), bytes, dtype, {}};
  }
  // Some dimensions repeated, unless these are results.
  trilobite_operand tensor(const int64_t *shape, int64_t dtype, bool repeated) {
    int64_t stride[TRILOBITE_DIMENSIONS] = {}, count = 1;
    for (int d = TRILOBITE_DIMENSIONS - 1; d >= 0; d--)
      if (!repeated || pick(0, 3)) stride[d] = count, count *= shape[d];
    trilobite_operand o = slot(count * size_of(dtype), dtype);
    memcpy(o.stride, stride, sizeof stride);
    return o;
  }
  trilobite_step_node &add(int64_t kind) {
    nodes.push_back({});
    nodes.back().kind = kind, nodes.back().digits = TRILOBITE_EXACT;
    return nodes.back();
  }

  void add_map() {
    trilobite_step_node &n = add(pick(TRILOBITE_COPY, TRILOBITE_FILL));
    const bool shared = !pick(0, 99);  // among threads
    for (int d = 0; d < TRILOBITE_DIMENSIONS; d++) n.shape[d] = d == 3 ? pick(1, 700) : shared ? 1 : pick(1, 4);
    if (shared) n.shape[pick(0, 2)] = pick(50, 60), n.shape[3] += 650;
    n.out = tensor(n.shape, pick(0, 3), false), n.a = tensor(n.shape, pick(0, 3), true), n.number = 2;
    if (n.kind == TRILOBITE_FILL || pick(0, 3)) n.b = tensor(n.shape, pick(0, 3), true);
    if (!pick(0, 3)) n.a = n.out;
  }
  void add_sum() {
    trilobite_step_node &n = add(TRILOBITE_SUM);
    const int64_t rows = n.shape[2] = pick(0, 99) ? pick(1, 5) : pick(40, 60), width = n.shape[3] = pick(1, 900);
    n.out = slot(4 * rows, TRILOBITE_F32), n.a = slot(4 * rows * width, TRILOBITE_F32);
    n.out.stride[2] = 1, n.a.stride[2] = width, n.a.stride[3] = 1, n.lanes = 4 << pick(0, 2), n.number = 3;
  }
  void add_softmax() {
    trilobite_step_node &n = add(TRILOBITE_SOFTMAX);
    const int64_t count = n.shape[2] = pick(1, 5), width = n.shape[3] = pick(1, pick(0, 1) ? 8 : 300);
    const int64_t dtype = width > 8 ? TRILOBITE_F32 : pick(0, 2), bytes = size_of(dtype) * count * width;
    n.out = slot(bytes, dtype), n.a = slot(bytes, dtype), n.lanes = 4 << pick(0, 2);
  }
  void add_top() {
    trilobite_step_node &n = add(TRILOBITE_TOP);
    const int64_t count = n.shape[2] = pick(1, 3), width = n.shape[3] = pick(1, 600);
    n.lanes = pick(1, pick(0, 1) || width < 9 ? width : 9), n.number = (float)pick(0, 1);
    const int64_t dtype = pick(0, 2), size = size_of(dtype);
    n.a = slot(size * count * width, dtype), n.out = slot(size * count * n.lanes, dtype);
    n.b = slot(8 * count * n.lanes, 0);
    if (dtype == TRILOBITE_F32 && !pick(0, 3)) ((float *)n.a.data)[pick(0, width - 1)] = NAN;
  }
  void add_places() {
    trilobite_step_node &n = add(pick(TRILOBITE_PICK, TRILOBITE_SCATTER));
    const int64_t count = n.shape[2] = pick(1, 3), width = n.shape[3] = pick(1, 300), some = n.lanes = pick(1, 9);
    const bool scatter = n.kind == TRILOBITE_SCATTER;
    const int64_t dtype = scatter ? TRILOBITE_F32 : pick(0, 2), size = size_of(dtype);
    n.out = slot(size * count * (scatter ? width : some), dtype), n.b = slot(8 * count * some, 0), n.number = 1;
    if (!scatter) n.a = slot(size * count * width, dtype);
    for (int64_t i = 0; i < count * some; i++) ((int64_t *)n.b.data)[i] = pick(0, 19) ? pick(0, width - 1) : hostile();
  }
  void add_number() {
    trilobite_step_node &n = add(TRILOBITE_NUMBER);
    n.out = slot(4, TRILOBITE_F32), n.b = slot(8, 0);
    *(int64_t *)n.b.data = pick(0, 1) ? pick(0, 100000) : hostile();
  }
  void add_gather() {
    trilobite_step_node &n = add(TRILOBITE_GATHER);
    const int64_t count = n.shape[2] = pick(1, 9), width = n.shape[3] = pick(1, 90);
    n.out = slot(width, 0), n.a = slot(count * width, 0), n.b = slot(8, 0);
    const int64_t row = pick(0, 9) ? pick(0, count - 1) : hostile();
    memcpy(n.b.data, &row, 8);
  }
  void add_linear() {
    trilobite_step_node &n = add(TRILOBITE_LINEAR);
    const int64_t group = 32 * pick(1, 3), k = group * pick(1, 3), rows = pick(1, 90), dtype = pick(0, 2);
    w = Weight{};
    fill(w, rows, k, group);
    n.shape[2] = pick(1, 3), n.call = &w.m;
    n.out = slot(n.shape[2] * rows * size_of(dtype), dtype), n.a = slot(n.shape[2] * k * size_of(dtype), dtype);
    if (pick(0, 1)) n.b = slot(rows * 4, TRILOBITE_F32);
    const trilobite_step_node first = n;
    for (int64_t more = pick(0, 3); more > 0; more--) {  // that read the same
      nodes.push_back(first);
      nodes.back().out = slot(first.out.bytes, dtype);
    }
  }
  void add_experts() {
    const int64_t group = 32 * pick(1, 2), hidden = group * pick(1, 2), intermediate = group * pick(1, 2);
    const int64_t count = pick(1, 4), active = pick(1, 3);
    layer = some_layer(count, hidden, intermediate, group, true);
    trilobite_experts_args &a = experts = {};
    a.x = slot(4 * hidden, 0).data, a.y = slot(4 * hidden, 0).data, a.weights = slot(4 * active, 0).data;
    auto *index = (int64_t *)slot(8 * active, 0).data;
    for (int64_t i = 0; i < active; i++) index[i] = pick(-1, count);
    a.index = index, a.slab = layer.slab.data(), a.table = layer.table.data(), a.index_bytes = 8, a.tokens = 1;
    a.active = active, a.experts = count, a.hidden = hidden, a.intermediate = intermediate, a.gated = 1;
    a.slab_bytes = (int64_t)layer.slab.size(), a.digits = TRILOBITE_EXACT;
    add(TRILOBITE_EXPERTS).call = &experts;
  }
  void add_dense() {
    trilobite_step_node &n = add(TRILOBITE_DENSE);
    const int64_t tokens = n.shape[1] = pick(1, 3), count = n.shape[2] = pick(1, 40), k = n.shape[3] = pick(1, 300);
    const int64_t heads = n.shape[0] = pick(0, 1) ? 1 : pick(1, 4), dtype = pick(0, 2), size = heads * size_of(dtype);
    n.out = slot(tokens * count * size, dtype), n.a = slot(tokens * k * size, dtype),
    n.b = slot(count * k * size, dtype);
    if (pick(0, 1)) n.c = slot(count * size, dtype);
  }
  // A new row, and attention over all of them, of one text or of some.
  void add_attention() {
    const int64_t kv_heads = pick(1, 3), heads = kv_heads * pick(1, 3), width = 16 * pick(1, 5), dtype = pick(0, 2);
    const int64_t limit = pick(1, 20), size = size_of(dtype);
    rows.resize(pick(1, 30));
    for (auto &r : rows) r = pick(0, 19) ? pick(0, limit - 1) : hostile();
    cache = {};
    cache.bytes = limit * kv_heads * width * size;
    cache.k = slot(cache.bytes, dtype).data, cache.v = slot(cache.bytes, dtype).data, cache.rows = rows.data();
    cache.capacity = (int64_t)rows.size(), cache.end = pick(0, cache.capacity - 1), cache.limit = limit;
    const bool apart = pick(0, 1);
    cache.row_stride = apart ? width : kv_heads * width, cache.head_stride = apart ? limit * width : width;
    trilobite_step_node &put = add(TRILOBITE_APPEND);
    put.shape[2] = kv_heads, put.shape[3] = width, put.lanes = pick(0, 1) ? width : pick(1, width), put.call = &cache;
    put.a = slot(kv_heads * width * size, dtype), put.b = slot(kv_heads * put.lanes * size, dtype);
    put.a.stride[2] = width, put.b.stride[2] = put.lanes, put.a.stride[3] = put.b.stride[3] = 1;
    for (int64_t texts = pick(1, 3); texts > 0; texts--) {
      trilobite_step_node &n = add(TRILOBITE_ATTEND);
      n.shape[1] = heads, n.shape[2] = kv_heads, n.shape[3] = width, n.call = &cache, n.number = 0.2f;
      n.out = slot(heads * width * size, dtype), n.a = slot(heads * width * size, dtype);
      if (pick(0, 1)) n.b = slot(heads * 4, TRILOBITE_F32);
      if (pick(0, 1)) n.lanes = pick(1, 5), n.c = slot(heads * n.lanes * 4, TRILOBITE_F32);
    }
  }

  explicit List(int64_t length) {
    // What some nodes point to is there once.
    bool linear = false, experts_there = false, attention = false;
    while (length-- > 0) {
      const int64_t what = pick(0, 12);
      if (what == 5 && !linear) add_linear(), linear = true;
      else if (what == 6 && !experts_there) add_experts(), experts_there = true;
      else if (what == 7 && !attention) add_attention(), attention = true;
      else if (what == 4) add_gather();
      else if (what == 8) add_dense();
      else if (what == 3) add_sum();
      else if (what == 9) add_softmax();
      else if (what == 10) add_top();
      else if (what == 11) add_number();
      else if (what == 12) add_places();
      else add_map();
    }
  }

  void break_operand(trilobite_operand &o) {
    switch (pick(0, 4)) {
      case 0: o.stride[pick(0, 3)] = hostile(); break;
      case 1: o.dtype = hostile(); break;
      case 2: o.bytes = pick(0, 1) || o.bytes == 0 ? -1 : pick(0, o.bytes - 1); break;
      case 3: o.data = nullptr; break;
      default: {  // other memory, or some of it
        Bytes &other = slots[pick(0, (int64_t)slots.size() - 1)];
        const int64_t at = other.empty() || pick(0, 1) ? 0 : pick(0, (int64_t)other.size() - 1);
        o.data = other.data() + at, o.bytes = (int64_t)other.size() - at;
      }
    }
  }
  void break_cache() {
    switch (pick(0, 6)) {
      case 0: cache.first = hostile(); break;
      case 1: cache.end = hostile(); break;
      case 2: cache.limit = hostile(); break;
      case 3: cache.row_stride = hostile(); break;
      case 4: cache.head_stride = hostile(); break;
      case 5: cache.capacity = pick(-1, cache.capacity); break;
      default: cache.k = nullptr;
    }
  }
  void break_experts() {
    int64_t *const numbers[] = {&experts.dtype,      &experts.weights_dtype, &experts.index_bytes, &experts.digits,
                                &experts.bias_dtype, &experts.gated,         &experts.activation};
    if (pick(0, 1)) *numbers[pick(0, 6)] = hostile();
    else layer.table[pick(0, (int64_t)layer.table.size() - 1)] = hostile();
  }
  void break_something() {
    trilobite_step_node &n = nodes[pick(0, (int64_t)nodes.size() - 1)];
    switch (pick(0, 7)) {
      case 0: {
        const int64_t kind = hostile();  // of another kind, what `call` points to would be another promise
        if (n.call == nullptr || kind < TRILOBITE_LINEAR || kind > TRILOBITE_SCAN) n.kind = kind;
        break;
      }
      case 1: n.lanes = hostile(); break;
      case 2: n.digits = hostile(); break;
      case 3: n.threads = pick(-1, 3); break;
      case 4: {
        if (n.kind == TRILOBITE_APPEND || n.kind == TRILOBITE_ATTEND) break_cache();
        else if (n.kind == TRILOBITE_EXPERTS) break_experts();
        else if (pick(0, 1)) n.call = nullptr;
        break;
      }
      case 5: n.shape[pick(0, 3)] = hostile(); break;
      default: break_operand(pick(0, 3) == 0 ? n.out : pick(0, 2) == 0 ? n.c : pick(0, 1) ? n.a : n.b);
    }
  }
};

}  // namespace

bool fuzz_step() {
  for (int i = 0; i < 100; i++) {
    List list(pick(1, 6));
    const bool broken = pick(0, 9) > 0;
    for (int64_t times = broken ? pick(1, 2) : 0; times > 0; times--) list.break_something();
    const auto count = (int64_t)list.nodes.size();
    const int64_t end = list.cache.end;
    const int code = trilobite_step_check(list.nodes.data(), pick(0, 99) ? count : -count);
    g_steps.lists++, g_steps.broken += broken, g_steps.refused += broken && code != 0;
    if (!broken && code != 0) {
      if (strstr(trilobite_error(), "nodes")) continue;  // asked for less than nothing
      printf("step: refused a list that is right: %s\n", trilobite_error());
      return false;
    }
    for (const char *tier : TIERS) {
      if (code != 0) break;
      trilobite_set_tier(tier);
      list.cache.end = end;
      trilobite_step(list.nodes.data(), count, pick(1, 2));
    }
  }
  return true;
}

}  // namespace fuzz
