// The layers of Llama-like models for passes over a few tokens, on a CPU: one call for all of them. And trained heads.
//
// Every number of a token is made of the same operations in the same order whatever stands beside it: how many tokens
// and texts share the pass, how many threads there are, how long the cache is. So a draft's tokens get, bit by bit, the
// logits that plain decoding would give them.
//
// Weights are read once for all tokens of a pass, in panels of 16 outputs: [panel][input][16]. bfloat16 ones keep
// their two bytes and stand in pairs of inputs, [panel][input / 2][16][2], so that a shift and a mask widen them, and
// CPUs with bfloat16 instructions multiply them as they are. Sums are float32. Where the model's type is bfloat16,
// results are rounded where its modules round.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>
#include <sched.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t Whole __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourWhole __attribute__((vector_size(16)));
typedef uint16_t Half __attribute__((vector_size(16)));

// What follows is laid out as in kernels.py.

struct Linear {
    const void *weight;  // panels
    const float *bias;   // [out], or null
    int32_t in, out;
    int32_t wide;  // float32 panels, not bfloat16
};

struct Layer {
    const float *before_attention, *before_mlp;  // weights of the norms
    Linear qkv, o, gate_up, down;
};

struct Model {
    const Layer *layers;
    const float *last_norm;
    int32_t count, hidden, heads, shared, size, inner;  // shared: key/value heads; size: of a head; inner: of the MLP
    int32_t rounds;                                     // results and cache are bfloat16
    float epsilon, scaling;
};

struct Heads {  // of the MLP speculator's kind
    Linear first, later, inner, outer, words;  // projections of the carry, by head; words: to logits
    const float *norm_weight, *norm_bias;
    float token_weight, epsilon;
    int32_t hidden, rounds;
};

struct Pass {
    float *states;                // [texts * width, hidden], in and out
    const float *cos, *sin;       // [texts * width, size]; the sine of the first half is negative
    const int64_t *positions;     // [texts * width]
    const int32_t *seats;         // [texts], rows of the cache
    void *const *keys, *const *values;  // of each layer [.., shared, capacity, size]
    const int32_t *windows;       // of each layer: positions that it sees, 0 for all
    float *scratch;               // as many numbers as `scratch_for` says
    int64_t capacity;
    int32_t texts, width, threads;
    int32_t begin, end;           // layers to run; behind the last of all comes the last norm
};

namespace {

const int TOGETHER = 6;         // tokens whose sums stand in registers
const int TOGETHER_PAIRS = 12;  // the same where pairs are multiplied at once
const int AHEAD = 256;          // pairs of weights that are on their way to the cache of a core
const int BLOCK = 96;           // tokens whose inputs stay in the cache of a core
const int QUERIES = 32;         // of a group of heads that read keys and values together
const double WIDENING = 1.5;    // what bringing keys and values to float32 takes, in queries
const int SPAN = 64;            // keys that stay in the cache of a core

// Threads of one call, which take their shares of what there is to do and wait for each other.
//
// Who waits looks for a while, then lets others run, then sleeps in between: beside other work on the machine a thread may
// have been put aside, and looking on would keep it from coming back.
class Team {
  public:
    void wait() {
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == omp_get_num_threads() - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int looks = 0; round.load(std::memory_order_acquire) == now; looks++) {
            if (looks > LOOKS + YIELDS) {
                const timespec pause = {0, 20000};
                nanosleep(&pause, nullptr);
            } else if (looks > LOOKS) sched_yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }

    // Of `count` the share of the thread that asks: calls `work(begin, end)`, then waits for all.
    template <class Work>
    void share(int64_t count, const Work &work) {
        const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
        const int64_t begin = count * i / n, end = count * (i + 1) / n;
        if (begin < end) work(begin, end);
        wait();
    }

  private:
    static const int LOOKS = 4000;   // some 0.05 ms
    static const int YIELDS = 4000;  // some ms
    std::atomic<int> arrived{0}, round{0};
};

inline Eight load(const float *p) { Eight v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float *p, Eight v) { std::memcpy(p, &v, sizeof v); }

inline Eight load(const uint16_t *p) {
    Half h;
    std::memcpy(&h, p, sizeof h);
    return (Eight)(__builtin_convertvector(h, Bits) << 16);
}

// sum + a * b with one rounding, where the CPU has it. Compilers are told to fuse nothing by themselves: they would in one loop
// and not in the next, and the bits of a number would depend on what stands beside it.
inline Eight fused(Eight sum, Eight a, Eight b) {
#if defined(__FMA__)
    return (Eight)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    float32x4_t s[2], x[2], y[2];
    std::memcpy(s, &sum, sizeof s), std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y);
    for (int i = 0; i < 2; i++) s[i] = vfmaq_f32(s[i], x[i], y[i]);
    std::memcpy(&sum, s, sizeof s);
    return sum;
#else
    return sum + a * b;
#endif
}

inline Eight fused(Eight sum, Eight a, float b) { return fused(sum, a, Eight{} + b); }

inline float rounded(float x) {  // to bfloat16, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000u : (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline Eight rounded(Eight x) {
    const Bits bits = (Bits)x, even = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return x != x ? (Eight)(Bits{} + 0x7fc00000u) : (Eight)even;
}

template <class T>
inline T in_type(T x, bool rounds) { return rounds ? rounded(x) : x; }

inline Eight exponential(Eight x) {
    const Eight low = Eight{} - 87.0f, high = Eight{} + 88.0f;
    x = x < low ? low : x;  // both keep what is no number
    x = x > high ? high : x;
    const Eight magic = Eight{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    Eight n = fused(magic, x, 1.44269504f) - magic;
    Eight r = fused(fused(x, n, -0.693359375f), n, 2.12194440e-4f);
    Eight p = Eight{} + 1.9875691500e-4f;
    for (const float each : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(Eight{} + each, p, r);
    p = fused(r, p, r * r) + 1.0f;
    Whole power = (__builtin_convertvector(n, Whole) + 127) << 23;
    return p * (Eight)power;
}

inline Four halved(Eight v) {
    Four low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, (const char *)&v + sizeof low, sizeof high);
    return low + high;
}

inline float sum(Eight v) {
    const Four x = halved(v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

template <int I, int J, int K, int L>
inline Four picked(Four a, Four b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I, J, K, L);
#else
    return __builtin_shuffle(a, b, FourWhole{I, J, K, L});
#endif
}

// Each as `sum` has it.
inline Four sums(const Eight *v) {
    const Four a = halved(v[0]), b = halved(v[1]), c = halved(v[2]), d = halved(v[3]);
    const Four x = picked<0, 4, 1, 5>(a, b) + picked<2, 6, 3, 7>(a, b);  // 0 + 2 and 1 + 3, of a and b in turn
    const Four y = picked<0, 4, 1, 5>(c, d) + picked<2, 6, 3, 7>(c, d);
    return picked<0, 1, 4, 5>(x, y) + picked<2, 3, 6, 7>(x, y);
}

// Numbers that are multiplied at once, and their products added to a sum in each lane.
template <class T> const int LANES = 8;

inline Eight more(Eight sum, const float *a, const float *b) { return fused(sum, load(a), load(b)); }

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
template <> const int LANES<uint16_t> = 16;

inline Eight more(Eight sum, const uint16_t *a, const uint16_t *b) {
    __m256i x, y;
    std::memcpy(&x, a, sizeof x), std::memcpy(&y, b, sizeof y);
    return (Eight)_mm256_dpbf16_ps((__m256)sum, (__m256bh)x, (__m256bh)y);
}
#endif

// Of Q queries and 4 keys, [size] each; size = LANES vectors.
template <int Q, class T>
inline void products(const T *const *queries, const T *keys, int size, float scaling, float *const *scores) {
    Eight found[Q][4] = {};
    for (int i = 0; i < size; i += LANES<T>)
        for (int q = 0; q < Q; q++)
            for (int n = 0; n < 4; n++) found[q][n] = more(found[q][n], queries[q] + i, keys + n * size + i);
    for (int q = 0; q < Q; q++) {
        const Four all = sums(found[q]) * scaling;
        std::memcpy(scores[q], &all, sizeof all);
    }
}

template <class T>
inline float product(const T *query, const T *key, int size, float scaling) {
    Eight found = {};
    for (int i = 0; i < size; i += LANES<T>) found = more(found, query + i, key + i);
    return sum(found) * scaling;
}

// Adds to sums [8 N] of Q queries what some values, `size` apart, weigh.
template <int Q, int N>
inline void weigh(const float *const *weights, const float *values, int64_t count, int size, float *const *sums) {
    Eight found[Q][N];
    for (int q = 0; q < Q; q++)
        for (int i = 0; i < N; i++) found[q][i] = load(sums[q] + 8 * i);
    for (int64_t at = 0; at < count; at++, values += size)
        for (int i = 0; i < N; i++) {
            const Eight value = load(values + 8 * i);
            for (int q = 0; q < Q; q++) found[q][i] = fused(found[q][i], value, weights[q][at]);
        }
    for (int q = 0; q < Q; q++)
        for (int i = 0; i < N; i++) store(sums[q] + 8 * i, found[q][i]);
}

// Takes what 16 outputs of one token come to.
struct Keep {
    float *y;
    int64_t stride;
    const float *bias;
    int out;
    bool rounds, adds;  // adds: to what is there, as a residual

    void operator()(int token, int first, Eight a, Eight b) const {
        float *to = y + token * stride + first;
        if (out - first >= 16) {
            put(to, a, bias ? bias + first : nullptr);
            put(to + 8, b, bias ? bias + first + 8 : nullptr);
            return;
        }
        float found[16];
        store(found, a), store(found + 8, b);
        for (int i = 0; i < out - first; i++) {
            const float z = in_type(bias ? found[i] + bias[first + i] : found[i], rounds);
            to[i] = adds ? in_type(to[i] + z, rounds) : z;
        }
    }

    void put(float *to, Eight z, const float *more) const {
        z = in_type(more ? z + load(more) : z, rounds);
        store(to, adds ? in_type(load(to) + z, rounds) : z);
    }
};

// 16 outputs for N tokens: of float32 weights.
template <int N>
inline void panel(const float *w, const float *x, int in, int token, int first, const Keep &keep) {
    Eight a[N] = {}, b[N] = {};
    for (int k = 0; k < in; k++) {
        const Eight u = load(w + 16 * (int64_t)k), v = load(w + 16 * (int64_t)k + 8);
        for (int n = 0; n < N; n++) {
            const float each = x[(int64_t)n * in + k];
            a[n] = fused(a[n], u, each);
            b[n] = fused(b[n], v, each);
        }
    }
    for (int n = 0; n < N; n++) keep(token + n, first, a[n], b[n]);
}

// Of bfloat16 weights, in pairs of inputs.
template <int N>
inline void panel(const uint16_t *w, const float *x, int in, int token, int first, const Keep &keep) {
    Eight a[N] = {}, b[N] = {};
    for (int k = 0; k < in; k += 2) {
        Bits u, v;
        std::memcpy(&u, w + 16 * (int64_t)k, sizeof u);
        std::memcpy(&v, w + 16 * (int64_t)k + 16, sizeof v);
        for (int n = 0; n < N; n++) {
            const float each = x[(int64_t)n * in + k];
            a[n] = fused(a[n], (Eight)(u << 16), each);
            b[n] = fused(b[n], (Eight)(v << 16), each);
        }
        for (int n = 0; n < N; n++) {
            const float each = x[(int64_t)n * in + k + 1];
            a[n] = fused(a[n], (Eight)(u & 0xffff0000u), each);
            b[n] = fused(b[n], (Eight)(v & 0xffff0000u), each);
        }
    }
    for (int n = 0; n < N; n++) keep(token + n, first, a[n], b[n]);
}

#ifdef __AVX512BF16__
// Of bfloat16 weights and inputs, x [N][in / 2] pairs.
template <int N>
inline void panel(const uint16_t *w, const uint32_t *x, int in, int token, int first, const Keep &keep) {
    const int pairs = in / 2;
    __m512 sums[N];
    for (int n = 0; n < N; n++) sums[n] = _mm512_setzero_ps();
    for (int j = 0; j < pairs; j++) {
        const uint16_t *here = w + 32 * (int64_t)j;
        if (N >= 3) __builtin_prefetch(here + 32 * AHEAD, 0, 2);  // it computes for longer than it would look ahead
        const __m512bh weights = (__m512bh)_mm512_loadu_si512(here);
        for (int n = 0; n < N; n++)
            sums[n] = _mm512_dpbf16_ps(sums[n], weights, (__m512bh)_mm512_set1_epi32(x[(int64_t)n * pairs + j]));
    }
    for (int n = 0; n < N; n++) {
        Eight halves[2];
        std::memcpy(halves, &sums[n], sizeof halves);
        keep(token + n, first, halves[0], halves[1]);
    }
}

// The pairs of numbers that are bfloat16 already, for the thread that asks until it asks again.
const uint32_t *paired(const float *x, int64_t count) {
    static thread_local std::vector<uint32_t> pairs;
    if ((int64_t)pairs.size() < count / 2) pairs.resize(count / 2);
    for (int64_t i = 0; i < count / 2; i++) {
        uint32_t both[2];
        std::memcpy(both, x + 2 * i, sizeof both);
        pairs[i] = both[0] >> 16 | (both[1] & 0xffff0000u);
    }
    return pairs.data();
}
#endif

// Tokens [t, t + n) of a panel, n at most `MOST`.
template <int MOST, class W, class X>
inline void some(int n, const W *w, const X *x, int in, int token, int first, const Keep &keep) {
    if (n == MOST) panel<MOST>(w, x, in, token, first, keep);
    else if constexpr (MOST > 1) some<MOST - 1>(n, w, x, in, token, first, keep);
}

// Some tokens through panels [begin, end), in groups of equal size, as few as there can be. step: of x, a token's.
template <int MOST, class W, class X>
void grouped(const W *weight, const X *x, int64_t step, int in, int begin, int end, int from, int to, const Keep &keep) {
    for (int j = begin; j < end; j++)
        for (int t = from; t < to;) {
            const int groups = (to - t + MOST - 1) / MOST, n = (to - t + groups - 1) / groups;
            some<MOST>(n, weight + (int64_t)j * in * 16, x + (t - from) * step, in, t, 16 * j, keep);
            t += n;
        }
}

// narrow: x holds bfloat16 numbers.
void panels(const Linear &linear, const float *x, int tokens, int begin, int end, bool narrow, const Keep &keep) {
    const int in = linear.in;
    for (int from = 0; from < tokens; from += BLOCK) {
        const int to = from + BLOCK < tokens ? from + BLOCK : tokens;
        const float *rows = x + (int64_t)from * in;
        if (linear.wide) {
            grouped<TOGETHER>((const float *)linear.weight, rows, in, in, begin, end, from, to, keep);
            continue;
        }
        const uint16_t *weight = (const uint16_t *)linear.weight;
#ifdef __AVX512BF16__
        if (narrow) {
            const uint32_t *pairs = paired(rows, (int64_t)(to - from) * in);
            grouped<TOGETHER_PAIRS>(weight, pairs, in / 2, in, begin, end, from, to, keep);
            continue;
        }
#endif
        grouped<TOGETHER>(weight, rows, in, in, begin, end, from, to, keep);
    }
}

// Each thread has a share of the outputs, and all have ended behind it. narrow: x holds bfloat16 numbers.
void product(Team &team, const Linear &linear, const float *x, int tokens, float *y, bool narrow, bool rounds, bool adds) {
    const Keep keep = {y, linear.out, linear.bias, linear.out, rounds, adds};
    team.share((linear.out + 15) / 16, [&](int64_t begin, int64_t end) {
        panels(linear, x, tokens, begin, end, narrow, keep);
    });
}

// What brings a vector to a root mean square of 1.
float to_one(const float *x, int size, float epsilon) {
    Eight squares = {};
    for (int i = 0; i < size; i += 8) squares = fused(squares, load(x + i), load(x + i));
    return 1.0f / std::sqrt(sum(squares) / size + epsilon);
}

void normed(const float *x, const float *weight, float *y, int hidden, float epsilon, bool rounds) {
    const float scale = to_one(x, hidden, epsilon);
    for (int i = 0; i < hidden; i += 8)
        store(y + i, in_type(in_type(load(x + i) * scale, rounds) * load(weight + i), rounds));
}

inline void put(void *cache, int64_t at, float x, bool rounds) {
    if (rounds) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        ((uint16_t *)cache)[at] = bits >> 16;  // rounded already
    } else {
        ((float *)cache)[at] = x;
    }
}

void turned(float *head, const float *cos, const float *sin, int size, bool rounds, float *scratch) {
    const int half = size / 2;
    for (int i = 0; i < size; i++) {
        const float swapped = head[i < half ? i + half : i - half];
        scratch[i] = in_type(in_type(head[i] * cos[i], rounds) + in_type(swapped * sin[i], rounds), rounds);
    }
    std::memcpy(head, scratch, size * sizeof(float));
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Scores, n >= 1, to their exponentials over the largest; returns the sum.
float exponentials(float *x, int64_t n) {
    Eight most = Eight{} + x[0];
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const Eight each = load(x + i);
        most = each > most || each != each ? each : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < 8; lane++) largest = most[lane] > largest || most[lane] != most[lane] ? most[lane] : largest;
    for (int64_t rest = i; rest < n; rest++) largest = x[rest] > largest ? x[rest] : largest;
    Eight eights = {};
    for (i = 0; i + 8 <= n; i += 8) {
        const Eight e = exponential(load(x + i) - largest);
        store(x + i, e);
        eights += e;
    }
    float total = sum(eights);
    if (i < n) {
        float rest[8] = {};
        std::memcpy(rest, x + i, (n - i) * sizeof(float));
        const Eight e = exponential(load(rest) - largest);
        for (int64_t j = i; j < n; j++) x[j] = e[j - i], total += e[j - i];
    }
    return total;
}

// Numbers as another type, in `room`, or they themselves if they are of it. Those that become bfloat16 are rounded already.
template <class T>
inline const T *as(const T *numbers, int64_t, T *) { return numbers; }

inline const float *as(const uint16_t *numbers, int64_t count, float *room) {
    for (int64_t i = 0; i < count; i += 8) store(room + i, load(numbers + i));
    return room;
}

inline const uint16_t *as(const float *numbers, int64_t count, uint16_t *room) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, numbers + i, 4);
        room[i] = bits >> 16;
    }
    return room;
}

// What some queries of one group of heads see of one text. Query q is of token q / times and head group * times + q % times.
// SIZE: of a head, 0 for whatever the model says.
template <int SIZE, class C>
void attend(const Model &model, const Pass &pass, const C *keys, const C *values, int window, const float *qkv,
            int text, int group, int begin, int end, float *seen, float *room) {
    const int size = SIZE ? SIZE : model.size, times = model.heads / model.shared;
    const int row = (model.heads + 2 * model.shared) * size, count = end - begin;
    // The type of queries and keys: bfloat16 ones are multiplied as they are, if there is an instruction for it.
    typedef typename std::conditional<SIZE % 16 == 0 && SIZE && LANES<C> == 16, C, float>::type Key;
    int64_t first = INT64_MAX, last = 0;
    struct Query {
        const Key *from;         // [size]
        float *to, *sums, *scores;  // [size], [size], of the keys by their place
        int64_t low, beyond;     // keys that it sees
        float total;
    } queries[QUERIES];
    for (int q = 0; q < count; q++) {
        const int64_t token = (int64_t)text * pass.width + (begin + q) / times, position = pass.positions[token];
        const int head = group * times + (begin + q) % times;
        Query &each = queries[q];
        each.from = as(qkv + token * row + head * size, size, (Key *)(room + q * size));
        each.to = seen + (token * model.heads + head) * size;
        each.low = window && position >= window ? position - window + 1 : 0;
        each.beyond = position + 1;
        if (each.low < first) first = each.low;
        if (each.beyond > last) last = each.beyond;
    }
    const int64_t length = (last - first + 7) / 8 * 8;
    float *scores = room + QUERIES * size, *sums = scores + count * length, *copies = sums + count * size;
    std::memset(sums, 0, count * size * sizeof(float));
    for (int q = 0; q < count; q++) queries[q].scores = scores + q * length - first, queries[q].sums = sums + q * size;

    // In blocks of keys that stay in the cache of a core; two queries at a time, where both see a key.
    for (int64_t block = first; block < last; block += SPAN) {
        const int64_t stop = block + SPAN < last ? block + SPAN : last;
        const Key *here = as(keys + block * size, (stop - block) * size, (Key *)copies) - block * size;
        for (int q = 0; q < count; q += 2) {
            const int both = q + 1 < count ? 2 : 1;
            const Key *from[2];
            int64_t at[2], beyond[2];
            for (int i = 0; i < both; i++) {
                const Query &each = queries[q + i];
                from[i] = each.from, at[i] = larger(block, each.low), beyond[i] = smaller(stop, each.beyond);
            }
            if (both == 2 && at[0] == at[1])
                for (; at[0] + 4 <= beyond[0] && at[0] + 4 <= beyond[1]; at[0] += 4, at[1] += 4) {
                    float *const to[2] = {queries[q].scores + at[0], queries[q + 1].scores + at[0]};
                    products<2, Key>(from, here + at[0] * size, size, model.scaling, to);
                }
            for (int i = 0; i < both; i++) {
                float *own = queries[q + i].scores;
                for (; at[i] + 4 <= beyond[i]; at[i] += 4) {
                    float *const to = own + at[i];
                    products<1, Key>(from + i, here + at[i] * size, size, model.scaling, &to);
                }
                for (; at[i] < beyond[i]; at[i]++) own[at[i]] = product(from[i], here + at[i] * size, size, model.scaling);
            }
        }
    }
    for (int q = 0; q < count; q++) {  // counted from each query's own first key, whatever the others see
        Query &each = queries[q];
        float *own = each.scores + each.low;
        each.total = exponentials(own, each.beyond - each.low);
    }
    for (int64_t block = first; block < last; block += SPAN) {
        const int64_t stop = block + SPAN < last ? block + SPAN : last;
        const float *here = as(values + block * size, (stop - block) * size, copies) - block * size;
        for (int q = 0; q < count; q += 2) {
            const int both = q + 1 < count ? 2 : 1;
            int64_t low[2], beyond[2], shared = 0;
            for (int i = 0; i < both; i++)
                low[i] = larger(block, queries[q + i].low), beyond[i] = smaller(stop, queries[q + i].beyond);
            if (both == 2 && low[0] == low[1]) shared = smaller(beyond[0], beyond[1]);
            for (int k = 0; k < size; k += k + 32 <= size ? 32 : 8) {
                const bool four = k + 32 <= size;
                const float *weights[2];
                float *to[2];
                for (int i = 0; i < both; i++) weights[i] = queries[q + i].scores + low[i], to[i] = queries[q + i].sums + k;
                if (shared > low[0]) {
                    if (four) weigh<2, 4>(weights, here + low[0] * size + k, shared - low[0], size, to);
                    else weigh<2, 1>(weights, here + low[0] * size + k, shared - low[0], size, to);
                }
                for (int i = 0; i < both; i++) {
                    const int64_t at = larger(shared, low[i]);
                    if (at >= beyond[i]) continue;
                    weights[i] += at - low[i];
                    if (four) weigh<1, 4>(weights + i, here + at * size + k, beyond[i] - at, size, to + i);
                    else weigh<1, 1>(weights + i, here + at * size + k, beyond[i] - at, size, to + i);
                }
            }
        }
    }
    for (int q = 0; q < count; q++)
        for (int i = 0; i < size; i++) queries[q].to[i] = in_type(queries[q].sums[i] / queries[q].total, model.rounds);
}

}  // namespace

extern "C" void run_linear(const Linear *linear, const float *x, float *y, int32_t tokens, int32_t rounds,
                           int32_t threads) {
    Team team;
#pragma omp parallel num_threads(threads)
    product(team, *linear, x, tokens, y, rounds, rounds, false);
}

// One head for some tokens: carry [tokens, hidden], in and out, and embedded ones to logits.
extern "C" void run_head(const Heads *given, int32_t later, float *carry, const float *embedded, float *logits,
                         int32_t tokens, int32_t threads) {
    const Heads &heads = *given;
    const int hidden = heads.hidden;
    std::vector<float> mixed((int64_t)tokens * hidden), of_token(mixed), feature(mixed);
    Team team;
#pragma omp parallel num_threads(threads)
    {
        if (!later)
            team.share(tokens, [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; t++) {
                    float *state = carry + t * hidden;
                    const float scale = to_one(state, hidden, heads.epsilon) * 0.70710678f;
                    for (int i = 0; i < hidden; i += 8) store(state + i, load(state + i) * scale);
                }
            });
        product(team, later ? heads.later : heads.first, carry, tokens, mixed.data(), false, false, false);
        product(team, heads.inner, embedded, tokens, of_token.data(), heads.rounds, false, false);
        team.share(tokens, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) {
                float *both = &mixed[t * hidden], *state = carry + t * hidden;
                const float *token = &of_token[t * hidden];
                for (int i = 0; i < hidden; i += 8)
                    store(both + i, fused(load(both + i), load(token + i), heads.token_weight));
                const float scale = to_one(both, hidden, heads.epsilon);
                for (int i = 0; i < hidden; i++) {
                    const float x = both[i] * scale * heads.norm_weight[i] + heads.norm_bias[i];
                    state[i] = 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
                }
            }
        });
        product(team, heads.outer, carry, tokens, feature.data(), false, heads.rounds, false);
        product(team, heads.words, feature.data(), tokens, logits, heads.rounds, heads.rounds, false);
    }
}

// Into how many pieces the queries of a group are cut, so that threads end together and read few keys twice.
static int pieces_of(int queries, int units, int threads) {
    const int fewest = (queries + QUERIES - 1) / QUERIES;
    double least = 1e300;
    int best = fewest;
    for (int pieces = fewest; pieces <= queries && pieces <= fewest + 2 * threads; pieces++) {
        const int most = (queries + pieces - 1) / pieces, rounds = (units * pieces + threads - 1) / threads;
        const double cost = rounds * (most + WIDENING);
        if (cost < least) least = cost, best = pieces;
    }
    return best;
}

// What each thread has for itself: its queries, their scores and sums, keys or values that are widened.
static int64_t room_for(const Model &model, int64_t capacity) {
    return QUERIES * (capacity + 8 + 2 * model.size) + SPAN * model.size;
}

extern "C" int64_t scratch_for(const Model *given, int64_t capacity, int32_t tokens, int32_t threads) {
    const Model &model = *given;
    const int64_t all = model.heads + 2 * model.shared;
    return tokens * (model.hidden + (all + model.heads) * model.size + 3 * (int64_t)model.inner) +
           threads * room_for(model, capacity);
}

extern "C" void run_layers(const Model *given, const Pass *asked) {
    const Model &model = *given;
    const Pass &pass = *asked;
    const int tokens = pass.texts * pass.width, hidden = model.hidden, size = model.size, inner = model.inner;
    const int turning = model.heads + model.shared, all = turning + model.shared, times = model.heads / model.shared;
    const int queries = pass.width * times, units = pass.texts * model.shared;
    const int pieces = pieces_of(queries, units, pass.threads), most = (queries + pieces - 1) / pieces;
    const bool rounds = model.rounds;
    float *normal = pass.scratch, *qkv = normal + (int64_t)tokens * hidden, *seen = qkv + (int64_t)tokens * all * size;
    float *gates = seen + (int64_t)tokens * model.heads * size, *active = gates + (int64_t)tokens * 2 * inner;
    float *rooms = active + (int64_t)tokens * inner, *x = pass.states;
    Team team;
#pragma omp parallel num_threads(pass.threads)
    {
        float *room = rooms + omp_get_thread_num() * room_for(model, pass.capacity);
        const auto norms = [&](const float *weight, float *y) {
            team.share(tokens, [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; t++)
                    normed(x + t * hidden, weight, y + t * hidden, hidden, model.epsilon, rounds);
            });
        };
        for (int l = pass.begin; l < pass.end; l++) {
            const Layer &layer = model.layers[l];
            norms(layer.before_attention, normal);
            product(team, layer.qkv, normal, tokens, qkv, rounds, rounds, false);
            team.share((int64_t)tokens * all, [&](int64_t begin, int64_t end) {
                for (int64_t each = begin; each < end; each++) {
                    const int64_t t = each / all, h = each % all;
                    float *head = &qkv[each * size];
                    if (h < turning) turned(head, pass.cos + t * size, pass.sin + t * size, size, rounds, room);
                    if (h < model.heads) continue;
                    void *cache = h < turning ? pass.keys[l] : pass.values[l];
                    const int64_t seat = pass.seats[t / pass.width] * (int64_t)model.shared + (h - model.heads) % model.shared;
                    for (int i = 0; i < size; i++)
                        put(cache, (seat * pass.capacity + pass.positions[t]) * size + i, head[i], rounds);
                }
            });
            team.share((int64_t)units * pieces, [&](int64_t begin, int64_t end) {
                for (int64_t each = begin; each < end; each++) {
                    const int piece = each % pieces, group = each / pieces % model.shared, text = each / pieces / model.shared;
                    const int first = piece * most, last = first + most < queries ? first + most : queries;
                    const int64_t at = ((int64_t)pass.seats[text] * model.shared + group) * pass.capacity * size;
                    const auto run = [&](const auto *keys, const auto *values) {
                        const auto by = size == 64    ? attend<64, std::decay_t<decltype(*keys)>>
                                        : size == 128 ? attend<128, std::decay_t<decltype(*keys)>>
                                                      : attend<0, std::decay_t<decltype(*keys)>>;
                        by(model, pass, keys + at, values + at, pass.windows[l], qkv, text, group, first, last, seen, room);
                    };
                    if (rounds) run((const uint16_t *)pass.keys[l], (const uint16_t *)pass.values[l]);
                    else run((const float *)pass.keys[l], (const float *)pass.values[l]);
                }
            });
            product(team, layer.o, seen, tokens, x, rounds, rounds, true);
            norms(layer.before_mlp, normal);
            product(team, layer.gate_up, normal, tokens, gates, rounds, rounds, false);
            team.share((int64_t)tokens * inner / 8, [&](int64_t begin, int64_t end) {
                for (int64_t each = 8 * begin; each < 8 * end; each += 8) {
                    const float *gate = &gates[each / inner * 2 * inner + each % inner];
                    const Eight z = load(gate), open = z / (1.0f + exponential(-z)), up = load(gate + inner);
                    store(&active[each], in_type(in_type(open, rounds) * up, rounds));
                }
            });
            product(team, layer.down, active, tokens, x, rounds, rounds, true);
        }
        if (pass.end == model.count) norms(model.last_norm, x);
    }
}
