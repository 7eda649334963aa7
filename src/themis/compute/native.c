/* Functions that process a layer in one pass over memory.
 *
 * Plain C, called through ctypes. The threads are those of the OpenMP runtime that torch has loaded. The library is not
 * linked to a runtime of its own, since two thread pools that compete for the cores are slower than none.
 */
#include <math.h>
#include <stdint.h>

/* Number of the names and arguments of the functions in this file; native.py refuses a library with another one. */
int32_t themis_interface(void)
{
    return 4;
}

#define BLOCK 1024 /* neurons whose sums stay in the first-level cache */
#define GROUP 4    /* tests that are folded side by side: several streams from memory are faster than one */
#define WIDTH 16   /* neurons that are folded at once: a cache line */
typedef float Lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Sums must be added in the order of the tests. */
#pragma GCC push_options
#pragma GCC optimize("no-associative-math")

/* Folds a group of tests into the sums over tests of `size` neurons; total [group] receives the sums over neurons.
 *
 * next are the clean rows of the following group, which are fetched on the way. They are used once, and should not evict
 * the model from the caches. */
static inline __attribute__((always_inline)) void fold_group(
    int64_t group, const float *const *activations, const float *const *clean, const float *const *next,
    const float *shift, int64_t size, float *first, float *second, float *total)
{
    Lanes totals[GROUP] = {{0.0f}};
    int64_t j = 0;
    for (; j + WIDTH <= size; j += WIDTH) {
        Lanes from = *(const Lanes *)(shift + j), sum = *(Lanes *)(first + j), square = *(Lanes *)(second + j);
        for (int64_t k = 0; k < group; k++) {
            __builtin_prefetch(next[k] + j, 0, 0);
            Lanes difference = *(const Lanes *)(activations[k] + j) - *(const Lanes *)(clean[k] + j);
            Lanes sensitivity = (Lanes)((Bits)difference & 0x7FFFFFFF), deviation = sensitivity - from;
            totals[k] += sensitivity;
            sum += deviation;
            square += deviation * deviation;
        }
        *(Lanes *)(first + j) = sum;
        *(Lanes *)(second + j) = square;
    }
    for (int64_t k = 0; k < group; k++) {
        for (int64_t width = WIDTH / 2; width; width /= 2)
            for (int64_t i = 0; i < width; i++)
                totals[k][i] += totals[k][i + width];
        total[k] = totals[k][0];
        for (int64_t i = j; i < size; i++) {
            float sensitivity = fabsf(activations[k][i] - clean[k][i]), deviation = sensitivity - shift[i];
            total[k] += sensitivity;
            first[i] += deviation;
            second[i] += deviation * deviation;
        }
    }
}

/* Sums over tests of the sensitivities less their shift, and of the squares.
 *
 * activations [n_tests, n]; clean [any, n], of which test t uses row rows[t]; shift, sums, squares [n];
 * by_test [blocks, n_tests] receives the sensitivity of each test summed over each block of neurons. panel [n_panel]
 * are neurons, ascending, whose signed differences go to the rows of differences, n_columns apart. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_fold_layer(const float *activations, const float *clean, const int64_t *rows, int64_t n_tests, int64_t n,
                       const float *shift, float *sums, float *squares, float *by_test, const int64_t *panel,
                       int64_t n_panel, float *differences, int64_t n_columns)
{
    int64_t n_blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t block = 0; block < n_blocks; block++) {
        int64_t start = block * BLOCK, size = n - start < BLOCK ? n - start : BLOCK, low = 0, high;
        float first[BLOCK], second[BLOCK];
        for (int64_t j = 0; j < size; j++)
            first[j] = second[j] = 0.0f;
        while (low < n_panel && panel[low] < start)
            low++;
        for (high = low; high < n_panel && panel[high] < start + size;)
            high++;
        for (int64_t t = 0, group; t < n_tests; t += group) {
            const float *a[GROUP], *c[GROUP], *next[GROUP];
            group = n_tests - t < GROUP ? 1 : GROUP;
            for (int64_t k = 0; k < group; k++) {
                a[k] = activations + (t + k) * n + start;
                c[k] = clean + rows[t + k] * n + start;
                next[k] = t + group + k < n_tests ? clean + rows[t + group + k] * n + start : c[k];
            }
            float *total = by_test + block * n_tests + t;
            if (group == GROUP)
                fold_group(GROUP, a, c, next, shift + start, size, first, second, total);
            else
                fold_group(1, a, c, next, shift + start, size, first, second, total);
            for (int64_t k = 0; k < group; k++)
                for (int64_t p = low; p < high; p++)
                    differences[(t + k) * n_columns + p] = a[k][panel[p] - start] - c[k][panel[p] - start];
        }
        for (int64_t j = 0; j < size; j++) {
            sums[start + j] = first[j];
            squares[start + j] = second[j];
        }
    }
}
#pragma GCC pop_options

/* Sums over inputs of the activations [n_inputs, n] less their shift [n], and of the squares. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_sums(const float *activations, int64_t n_inputs, int64_t n, const float *shift, float *sums, float *squares)
{
    int64_t n_blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (n_inputs * n > 32768)
    for (int64_t block = 0; block < n_blocks; block++) {
        int64_t start = block * BLOCK, size = n - start < BLOCK ? n - start : BLOCK;
        float first[BLOCK], second[BLOCK];
        for (int64_t j = 0; j < size; j++)
            first[j] = second[j] = 0.0f;
        const float *from = shift + start;
        for (int64_t i = 0; i < n_inputs; i++) {
            const float *a = activations + i * n + start;
            for (int64_t j = 0; j < size; j++) {
                float deviation = a[j] - from[j];
                first[j] += deviation;
                second[j] += deviation * deviation;
            }
        }
        for (int64_t j = 0; j < size; j++) {
            sums[start + j] = first[j];
            squares[start + j] = second[j];
        }
    }
}

/* total += part, both [n]. */
void themis_accumulate(double *total, const float *part, int64_t n)
{
#pragma omp parallel for schedule(static) if (n > 32768)
    for (int64_t j = 0; j < n; j++)
        total[j] += part[j];
}

static inline __attribute__((always_inline)) int32_t bits_of(float number)
{
    int32_t bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline __attribute__((always_inline)) float number_of(int32_t bits)
{
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

/* A uniform number in (0, 1): the same steps as in rng.py, with the same results. */
static inline __attribute__((always_inline)) float uniform(int64_t counter, int64_t seed)
{
    uint32_t x = (uint32_t)seed + (uint32_t)counter * 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x21F0AAADu + (uint32_t)(seed >> 32);
    x = (x ^ x >> 15) * 0xD35A2997u;
    x ^= x >> 15;
    int32_t bits = bits_of(((float)(int32_t)(x >> 8) + 0.5f) * 0x1p-24f);
    return number_of(bits - ((bits + (1 << 23)) >> 30)); /* 1 becomes the number before it, without a branch */
}

/* Uniform numbers in (0, 1), out [n_tests, n], from the noise seeds [n_tests], after `drawn` others. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_uniform(const int64_t *seed, int64_t n_tests, int64_t drawn, int64_t n, float *out)
{
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t t = 0; t < n_tests; t++)
        for (int64_t j = 0; j < n; j++)
            out[t * n + j] = uniform(drawn + j, seed[t]);
}

/* The numbers must be identical to torch's: no product is fused with a sum, and no sum reordered. */
#pragma GCC push_options
#pragma GCC optimize("no-associative-math", "fp-contract=off", "no-math-errno", "no-trapping-math")

/* Two standard normal numbers from two uniform ones, by Box and Muller: the same steps as `normal_pairs` in rng.py. */
static inline __attribute__((always_inline)) void normal_pair(float first, float second, float *even, float *odd)
{
    int32_t exponent = (bits_of(first) - 0x3F3504F3) >> 23; /* of the mantissa between the roots of 1/2 and 2 */
    float f = number_of(bits_of(first) - exponent * (1 << 23)) - 1.0f, power = (float)exponent, square = f * f;
    float y = f * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * square - power * 2.12194440e-4f - square * 0.5f;
    float radius = sqrtf((f + y + power * 0.693359375f) * -2.0f);
    float turn = second * 4.0f;
    int32_t quarter = (int32_t)(turn + 0.5f);
    float angle = (turn - (float)quarter) * 1.57079632679f, z = angle * angle;
    float cosine = ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z;
    float sine = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * angle + angle;
    cosine = cosine - z * 0.5f + 1.0f;
    /* In odd quarters of a turn they change places; signs are set by their bit. */
    int32_t swapped = (bits_of(cosine) ^ bits_of(sine)) & -(quarter & 1);
    *even = radius * number_of(bits_of(cosine) ^ swapped ^ ((quarter + 1) & 2) << 30);
    *odd = radius * number_of(bits_of(sine) ^ swapped ^ (quarter & 2) << 30);
}

/* Standard normal numbers, out [n_tests, n], after `drawn` uniform ones; with half as many as n, rounded up, number j is
 * made from the uniform numbers j and half + j, as is number half + j. Unless inputs [n_tests, n] is null, it is added to
 * the numbers after they are multiplied by sigma [n_tests]. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_normal(const int64_t *seed, int64_t n_tests, int64_t drawn, int64_t n, const float *sigma,
                   const float *inputs, float *out)
{
    int64_t half = (n + 1) / 2;
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t t = 0; t < n_tests; t++) {
        float *restrict even = out + t * n, *restrict odd = even + half, last;
        for (int64_t j = 0; j < n - half; j++)
            normal_pair(uniform(drawn + j, seed[t]), uniform(drawn + half + j, seed[t]), even + j, odd + j);
        if (n % 2)
            normal_pair(uniform(drawn + half - 1, seed[t]), uniform(drawn + 2 * half - 1, seed[t]), even + half - 1,
                        &last);
        if (inputs)
            for (int64_t j = 0; j < n; j++)
                even[j] = even[j] * sigma[t] + inputs[t * n + j];
    }
}
#pragma GCC pop_options

/* The answer of each test to a classification, and its margin: the same steps as `_compare` in oracle/classes.py.
 *
 * scores [n_tests, n]; reference [n_tests], the classes that the tests should keep; is_fault, outcome, margin [n_tests].
 * Returns how many references are no class; these tests are left out. */
int64_t themis_verdict(const float *scores, const int64_t *reference, int64_t n_tests, int64_t n, uint8_t *is_fault,
                       int64_t *outcome, float *margin)
{
    int64_t n_wrong = 0;
    for (int64_t t = 0; t < n_tests; t++) {
        if (reference[t] < 0 || reference[t] >= n) {
            n_wrong++;
            continue;
        }
        const float *score = scores + t * n;
        float best = -INFINITY, rival = -INFINITY;
        int64_t answer = 0;
        int is_finite = 1;
        for (int64_t j = 0; j < n; j++) {
            is_finite &= fabsf(score[j]) < INFINITY;
            if (score[j] > best) {
                best = score[j];
                answer = j;
            }
            if (j != reference[t] && score[j] > rival)
                rival = score[j];
        }
        outcome[t] = is_finite ? answer : -1;
        is_fault[t] = outcome[t] != reference[t];
        margin[t] = is_finite ? score[reference[t]] - rival : -INFINITY;
    }
    return n_wrong;
}

#define WORDS 512 /* numbers that are hashed at a time, in the first-level cache */

/* One step of SplitMix64. */
static inline __attribute__((always_inline)) uint64_t mixed(uint64_t state)
{
    state += 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

/* A uniform number in [0, 1) from a hash. */
static inline __attribute__((always_inline)) double uniform_of(uint64_t hash)
{
    return (double)(int64_t)(hash >> 11) * 0x1p-53;
}

/* A hash of n_words integers for each of [n_rows, n]: the same steps as `mix` in rng.py, with the same results.
 *
 * words[w] is the address of the first integer of a word, which is found across[w] integers further in the next column
 * and down[w] further in the next row. prefix is the hash of the words before. out: int64, or double in [0, 1) if
 * is_uniform; its rows are the columns of [n_rows, n] if is_transposed. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_mix(uint64_t prefix, const uint64_t *const *words, const int64_t *across, const int64_t *down,
                int64_t n_words, int64_t n_rows, int64_t n, int32_t is_uniform, int32_t is_transposed, void *out)
{
    int64_t next_row = is_transposed ? 1 : n, next_column = is_transposed ? n_rows : 1;
    for (int64_t start = 0; start < n; start += WORDS) {
        int64_t size = n - start < WORDS ? n - start : WORDS;
        uint64_t state[WORDS];
        for (int64_t row = 0; row < n_rows; row++) {
            uint64_t shared = prefix;
            int64_t w = 0;
            for (; w < n_words && across[w] == 0; w++) /* the same in every column */
                shared = mixed(shared ^ words[w][row * down[w]]);
            for (int64_t j = 0; j < size; j++)
                state[j] = shared;
            for (; w < n_words; w++) {
                const uint64_t *word = words[w] + row * down[w] + start * across[w];
                if (across[w] == 1)
                    for (int64_t j = 0; j < size; j++)
                        state[j] = mixed(state[j] ^ word[j]);
                else
                    for (int64_t j = 0; j < size; j++)
                        state[j] = mixed(state[j] ^ word[j * across[w]]);
            }
            int64_t first = row * next_row + start * next_column;
            if (is_uniform)
                for (int64_t j = 0; j < size; j++)
                    ((double *)out)[first + j * next_column] = uniform_of(state[j]);
            else
                for (int64_t j = 0; j < size; j++)
                    ((int64_t *)out)[first + j * next_column] = (int64_t)(state[j] >> 1);
        }
    }
}

#define STRIP 128 /* neurons whose rows of bits, or sums by block, stay in the first-level cache: 16 to 20 KB */

/* The section of each of `size` neurons in one test, -1 for none: the same steps as `Sections.numbers` in
 * criteria/kmnc.py. A difference, a quotient and a product cannot be fused, so the results are identical. */
static inline __attribute__((always_inline)) void sections(
    const float *a, const float *low, const float *high, const float *width, int64_t size, int64_t k, int is_ceil,
    int is_clamped, int32_t *section)
{
    float times = (float)k, last = (float)(k - 1);
    for (int64_t i = 0; i < size; i++) {
        float place = (a[i] - low[i]) / width[i];
        if (is_ceil)
            place = ceilf(place * times) - 1.0f;
        int is_in = (a[i] >= low[i]) & (a[i] <= high[i]) & (place >= 0.0f) & (is_clamped | (place < times));
        place = place < last ? place : last;
        section[i] = (int32_t)(is_in ? place : -1.0f);
    }
}

/* Sets the bits of the sections that the tests hit, in the order of the tests; returns how many bits were set.
 *
 * activations [n_tests, n]; low, high, width [n]; bits [n, words], one row of sections per neuron; raised [n_tests]
 * becomes 1 for tests that set a bit. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
int64_t themis_sections(const float *activations, int64_t n_tests, int64_t n, const float *low, const float *high,
                        const float *width, int64_t k, int64_t words, int32_t is_ceil, int32_t is_clamped,
                        uint32_t *bits, uint8_t *raised)
{
    int64_t n_strips = (n + STRIP - 1) / STRIP, total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (n_tests * n > 32768)
    for (int64_t strip = 0; strip < n_strips; strip++) {
        int64_t start = strip * STRIP, size = n - start < STRIP ? n - start : STRIP;
        const float *from = low + start, *to = high + start, *one = width + start;
        int32_t section[STRIP];
        for (int64_t t = 0; t < n_tests; t++) {
            const float *a = activations + t * n + start;
            if (t + 2 < n_tests) /* rows are too far apart for the hardware prefetcher */
                for (int64_t i = 0; i < size; i += 16)
                    __builtin_prefetch(a + 2 * n + i, 0, 3);
            if (is_ceil)
                sections(a, from, to, one, size, k, 1, is_clamped, section);
            else
                sections(a, from, to, one, size, k, 0, is_clamped, section);
            int64_t before = total;
            for (int64_t i = 0; i < size; i++) {
                if (section[i] < 0)
                    continue;
                uint32_t *word = bits + (start + i) * words + (section[i] >> 5), bit = 1u << (section[i] & 31);
                total += !(*word & bit);
                *word |= bit;
            }
            if (total > before)
                __atomic_store_n(raised + t, 1, __ATOMIC_RELAXED); /* every thread writes the same value */
        }
    }
    return total;
}

#define LANES 256 /* neurons whose sums, at 40 bytes each, stay in the first-level cache */

/* The sums must be identical to torch's: added in the order written, and no product fused with a sum. */
#pragma GCC push_options
#pragma GCC optimize("no-associative-math", "fp-contract=off")

/* Adds |differences| - shift, and its square, to the sums of the block of each test's seed, and counts the tests of each
 * block: the same steps as `Panel.add` in measure/panel.py.
 *
 * differences [n_tests, n]; seed [n_tests]; table [n_table], the block of a seed by its index modulo n_table;
 * count [blocks]; shift [n]; sums, squares [blocks, n]. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_add_panel(const float *differences, const int64_t *seed, int64_t n_tests, int64_t n, const int64_t *table,
                       int64_t n_table, int64_t *count, const float *shift, float *sums, float *squares)
{
    for (int64_t t = 0; t < n_tests; t++)
        count[table[seed[t] % n_table]]++;
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t start = 0; start < n; start += STRIP) {
        int64_t size = n - start < STRIP ? n - start : STRIP;
        const float *from = shift + start;
        for (int64_t t = 0; t < n_tests; t++) {
            int64_t block = table[seed[t] % n_table] * n + start;
            const float *difference = differences + t * n + start;
            float *sum = sums + block, *square = squares + block;
            for (int64_t j = 0; j < size; j++) {
                float deviation = fabsf(difference[j]) - from[j];
                sum[j] += deviation;
                square[j] += deviation * deviation;
            }
        }
    }
}

/* Adds powers 1 to 4 of the differences [n_tests, n], and 1 and 3 of their absolute values, to sums [6, n]. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_add_powers(const float *differences, int64_t n_tests, int64_t n, double *sums)
{
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t start = 0; start < n; start += LANES) {
        int64_t size = n - start < LANES ? n - start : LANES;
        double total[6][LANES] = {{0.0}};
        for (int64_t t = 0; t < n_tests; t++) {
            const float *difference = differences + t * n + start;
            for (int64_t j = 0; j < size; j++) {
                float first = difference[j], second = first * first, third = second * first;
                total[0][j] += first;
                total[1][j] += second;
                total[2][j] += third;
                total[3][j] += second * second;
                total[4][j] += fabsf(first);
                total[5][j] += fabsf(third);
            }
        }
        for (int64_t k = 0; k < 6; k++)
            for (int64_t j = 0; j < size; j++)
                sums[k * n + start + j] += total[k][j];
    }
}

/* Counts converged neurons test by test: the same steps as `converge_in_torch` in criteria/scc.py.
 *
 * activations, clean [n_tests, n]; shift, first, sums, squares, moved, varied [n], of which the last four are updated;
 * limits [n_tests]; before: number of earlier tests. counts [blocks, 3, n_tests] receives, after each test, how many
 * neurons of a block have converged, are judged, and had a finite sensitivity. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_converge(const float *activations, const float *clean, int64_t n_tests, int64_t n, int64_t before,
                     int64_t unseen, const double *limits, const double *shift, const float *first, double *sums,
                     double *squares, uint8_t *moved, uint8_t *varied, int32_t *counts)
{
    int64_t n_blocks = (n + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) if (n_tests * n > 32768)
    for (int64_t block = 0; block < n_blocks; block++) {
        int64_t start = block * LANES, size = n - start < LANES ? n - start : LANES;
        float sensitivity[LANES];
        int32_t has_moved[LANES], has_varied[LANES], is_seen[LANES];
        const double *from = shift + start;
        const float *origin = first + start;
        double *sum = sums + start, *square = squares + start;
        for (int64_t j = 0; j < size; j++) {
            has_moved[j] = moved[start + j];
            has_varied[j] = varied[start + j];
        }
        for (int64_t t = 0; t < n_tests; t++) {
            const float *a = activations + t * n + start, *c = clean + t * n + start;
            if (t + 2 < n_tests) /* rows are too far apart for the hardware prefetcher */
                for (int64_t j = 0; j < size; j += 16) {
                    __builtin_prefetch(a + 2 * n + j, 0, 3);
                    __builtin_prefetch(c + 2 * n + j, 0, 3);
                }
            int32_t is_late = before + t + 1 >= unseen, judged = 0, known = 0, converged = 0;
            for (int64_t j = 0; j < size; j++) {
                float s = fabsf(a[j] - c[j]);
                sensitivity[j] = s;
                known += s < INFINITY;
                has_moved[j] |= s > 0.0f;
                has_varied[j] |= c[j] != origin[j];
                judged += has_moved[j] | has_varied[j];
                is_seen[j] = has_moved[j] | (has_varied[j] & is_late);
            }
            double count = (double)(before + t + 1), limit = limits[t];
            for (int64_t j = 0; j < size; j++) {
                double deviation = (double)sensitivity[j] - from[j];
                sum[j] += deviation;
                square[j] += deviation * deviation;
                double mean = sum[j] / count, m2 = square[j] - mean * mean * count;
                m2 = m2 < 0.0 ? 0.0 : m2; /* NaN stays NaN */
                converged += (m2 < limit) & is_seen[j];
            }
            int32_t *here = counts + block * 3 * n_tests + t;
            here[0] = converged;
            here[n_tests] = judged;
            here[2 * n_tests] = known;
        }
        for (int64_t j = 0; j < size; j++) {
            moved[start + j] = (uint8_t)has_moved[j];
            varied[start + j] = (uint8_t)has_varied[j];
        }
    }
}
#pragma GCC pop_options

/* The arithmetic of the search: the same steps as in search/arithmetic.py and search/kinds.py, with the same constants.
 *
 * Sums are added in the order of the tests, so that they are the same on every CPU. */
#define FADING_TESTS 1500.0
#define MIN_PRECISION 1e-6
#define PRIOR_TESTS 20.0
#define ESTIMATE_WEIGHT 5.0
#define ANSWER_PRIOR_FAULTS 5.0
#define CLEAN_MARGIN_WEIGHT 0.25
#define FIRST_FAULT_BONUS 1.0
#define REPEAT_VALUE 0.3
#define KEPT_MARGIN_OFFSET 0.03f
#define MAX_SEED_FAULTS 32
#define MAX_SEEN_ONCE 16

#pragma GCC push_options
#pragma GCC optimize("no-associative-math", "fp-contract=off", "no-math-errno", "no-trapping-math")

static inline double at_most(double x, double most)
{
    return x > most ? most : x; /* NaN stays NaN, here and below */
}

static inline double at_least(double x, double least)
{
    return x < least ? least : x;
}

static double logistic(double x)
{
    return 1.0 / (exp(-at_least(at_most(x, 30.0), -30.0)) + 1.0);
}

static double sum(const double *numbers, int64_t n)
{
    double total = 0.0;
    for (int64_t j = 0; j < n; j++)
        total += numbers[j];
    return total;
}

static int are_below(const int64_t *indices, int64_t n, int64_t end)
{
    int are = 1;
    for (int64_t j = 0; j < n; j++)
        are &= (uint64_t)indices[j] < (uint64_t)end;
    return are;
}

/* What is known of the seeds [n_seeds] and of their clean answers [n_answers]. */
struct seeds {
    int64_t n_seeds, n_answers;
    const float *clean;  /* margins */
    const float *margin; /* the smallest margins so far */
    const int64_t *answer_index; /* numbers of clean answers */
    int64_t *tests, *broke, *faults, *seen_once;
    const int64_t *corners; /* that were tried */
    const int64_t *ahead;   /* tests that were proposed, and whose results are not known yet */
    double *total_margin;
    double *margin_losses, *answer_faults;         /* [2, n_answers] */
    double *curve, *precision, *squared_shortfall; /* [2], [2, 2], [] */
    double *seen_faults, *new_faults;              /* [MAX_SEED_FAULTS, MAX_SEEN_ONCE] */
};

/* Where seeds with so many faults, and outcomes seen once, are found in `seen_faults` and `new_faults`. */
static inline int64_t cell_of(int64_t faults, int64_t seen_once)
{
    faults = faults < 0 ? 0 : faults < MAX_SEED_FAULTS ? faults : MAX_SEED_FAULTS - 1;
    seen_once = seen_once < 0 ? 0 : seen_once < MAX_SEEN_ONCE ? seen_once : MAX_SEEN_ONCE - 1;
    return faults * MAX_SEEN_ONCE + seen_once;
}

static double frailty(const struct seeds *s, int64_t answer)
{
    double faults = s->answer_faults[answer], expected_faults = s->answer_faults[s->n_answers + answer];
    return log((faults + ANSWER_PRIOR_FAULTS) / (expected_faults + ANSWER_PRIOR_FAULTS));
}

/* The mean margin of a seed; usual is the usual loss of margin. */
static inline double expected(const struct seeds *s, int64_t seed, double usual)
{
    int64_t answer = s->answer_index[seed];
    double tests = s->margin_losses[answer], loss = s->margin_losses[s->n_answers + answer];
    double fall = (loss + PRIOR_TESTS * usual) / (tests + PRIOR_TESTS);
    double first = CLEAN_MARGIN_WEIGHT * (s->clean[seed] - fall);
    return (first + s->total_margin[seed]) / (CLEAN_MARGIN_WEIGHT + (double)s->tests[seed]);
}

static double usual_fall(const struct seeds *s)
{
    return sum(s->margin_losses + s->n_answers, s->n_answers) / at_least(sum(s->margin_losses, s->n_answers), 1.0);
}

/* Learns from n_tests tests of the search stream: `learn_margins` in search/arithmetic.py.
 *
 * spreads: as predicted for the tests; shortfall receives how much lower than expected the margins were. Returns 0,
 * or 1 if a position is no seed or a number no answer; nothing has changed then. */
int32_t themis_learn_margins(const struct seeds *s, int64_t n_tests, const int64_t *position, const uint8_t *is_fault,
                             const float *margins, const double *spreads, double *shortfall)
{
    if (!are_below(position, n_tests, s->n_seeds) || !are_below(s->answer_index, s->n_seeds, s->n_answers))
        return 1;
    double fading = exp(-(double)n_tests / FADING_TESTS), before[2] = {s->curve[0], s->curve[1]};
    double first = before[0], second = before[1], c11 = 0.0, c12 = 0.0, c22 = 0.0;
    double p11 = at_least(fading * s->precision[0], MIN_PRECISION), p12 = fading * s->precision[1];
    double p22 = at_least(fading * s->precision[3], MIN_PRECISION), *frailties = shortfall;
    for (int64_t t = 0; t < n_tests; t++)
        frailties[t] = frailty(s, s->answer_index[position[t]]);
    for (int64_t step = 0; step < 4; step++) { /* of Newton's method */
        double slope1 = 0.0, slope2 = 0.0;
        c11 = c12 = c22 = 0.0;
        for (int64_t t = 0; t < n_tests; t++) {
            double chance = logistic(first + second * spreads[t] + frailties[t]);
            double missed = (double)is_fault[t] - chance, weight = chance * (1.0 - chance);
            slope1 += missed;
            slope2 += missed * spreads[t];
            c11 += weight;
            c12 += weight * spreads[t];
            c22 += weight * spreads[t] * spreads[t];
        }
        slope1 -= p11 * (first - before[0]) + p12 * (second - before[1]);
        slope2 -= p12 * (first - before[0]) + p22 * (second - before[1]);
        c11 += p11;
        c12 += p12;
        c22 += p22;
        double ratio = c12 / c11, move = (slope2 - ratio * slope1) / at_least(c22 - ratio * c12, MIN_PRECISION);
        first += at_most(at_least((slope1 - c12 * move) / c11, -2.0), 2.0);
        second += at_most(at_least(move, -2.0), 2.0);
    }
    s->curve[0] = first;
    s->curve[1] = second;
    s->precision[0] = c11;
    s->precision[1] = s->precision[2] = c12;
    s->precision[3] = c22;
    float limit = 0.0f;
    for (int64_t j = 0; j < s->n_seeds; j++)
        limit = fabsf(s->clean[j]) > limit ? fabsf(s->clean[j]) : limit;
    for (int64_t j = 0; j < 2 * s->n_answers; j++)
        s->answer_faults[j] *= fading;
    for (int64_t t = 0; t < n_tests; t++) {
        int64_t answer = s->answer_index[position[t]];
        float margin = (float)at_most(at_least(margins[t], -limit), limit); /* an extreme output counts as one fault */
        s->answer_faults[answer] += is_fault[t];
        s->answer_faults[s->n_answers + answer] += logistic(first + second * spreads[t]);
        s->margin_losses[answer] += 1.0;
        s->margin_losses[s->n_answers + answer] += s->clean[position[t]] - margin;
    }
    double usual = usual_fall(s), surprise = 0.0;
    for (int64_t t = 0; t < n_tests; t++) {
        double doubt = 1.0 + 1.0 / (CLEAN_MARGIN_WEIGHT + (double)s->tests[position[t]]);
        double margin = at_most(at_least(margins[t], -limit), limit);
        shortfall[t] = expected(s, position[t], usual) - margin;
        surprise += shortfall[t] * shortfall[t] / doubt;
    }
    *s->squared_shortfall += surprise;
    double variance = *s->squared_shortfall / sum(s->margin_losses, s->n_answers);
    for (int64_t t = 0; t < n_tests; t++) {
        double doubt = 1.0 + 1.0 / (CLEAN_MARGIN_WEIGHT + (double)s->tests[position[t]]);
        shortfall[t] /= at_least(sqrt(variance * doubt), 1e-12);
    }
    for (int64_t t = 0; t < n_tests; t++) {
        s->total_margin[position[t]] += at_most(at_least(margins[t], -limit), limit);
        s->tests[position[t]]++;
        s->broke[position[t]] += is_fault[t];
    }
    return 0;
}

/* Learns from n faults: `learn_faults` in search/arithmetic.py.
 *
 * key [n]: a number per seed and outcome; order [n]: sorts them, and keeps the order of equal ones. known, times
 * [n_known]: the keys known before, ascending, and how often each was seen; together they receive those of the n faults
 * in merged, merged_times [n_known + n]. change [n]: zeros, overwritten. first [n] receives the first fault of each new
 * key. Returns how many keys are new, or -1 if a position is no seed; nothing has changed then. */
int64_t themis_learn_faults(const struct seeds *s, int64_t n, int64_t n_known, const int64_t *position,
                            const int64_t *key, const int64_t *order, const int64_t *known, const int64_t *times,
                            int64_t *merged, int64_t *merged_times, int64_t *change, int64_t *first)
{
    if (!are_below(position, n, s->n_seeds) || !are_below(order, n, n))
        return -1;
    int64_t i = 0, n_new = 0;
    for (int64_t t = 0; t < n; t++)
        s->seen_faults[cell_of(s->faults[position[t]], s->seen_once[position[t]])]++;
    for (int64_t g = 0, end; g < n; g = end) { /* faults with the same key */
        int64_t fault = order[g];
        for (end = g + 1; end < n && key[order[end]] == key[fault];)
            end++;
        for (; i < n_known && known[i] < key[fault]; i++) {
            merged[i + n_new] = known[i];
            merged_times[i + n_new] = times[i];
        }
        merged[i + n_new] = key[fault];
        merged_times[i + n_new] = end - g;
        if (i < n_known && known[i] == key[fault]) {
            change[fault] = -(times[i] == 1);
            merged_times[i + n_new] += times[i];
            i++;
        } else {
            s->new_faults[cell_of(s->faults[position[fault]], s->seen_once[position[fault]])]++;
            change[fault] = end - g == 1;
            first[n_new++] = fault;
        }
    }
    for (; i < n_known; i++) {
        merged[i + n_new] = known[i];
        merged_times[i + n_new] = times[i];
    }
    for (int64_t t = 0; t < n; t++) {
        s->seen_once[position[t]] += change[t];
        s->faults[position[t]]++;
    }
    return n_new;
}

/* Each seed's expected next margin, in standard deviations: `spreads_above` in search/arithmetic.py.
 *
 * first_spread is the standard deviation before the first test. */
static inline __attribute__((always_inline)) void find_spreads(
    const struct seeds *s, double first_spread, double *spreads)
{
    double n = sum(s->margin_losses, s->n_answers), usual = usual_fall(s);
    double spread = at_least(n > 0.0 ? sqrt(*s->squared_shortfall / n) : first_spread, 1e-12);
    for (int64_t j = 0; j < s->n_seeds; j++) {
        double doubt = sqrt(1.0 + 1.0 / (CLEAN_MARGIN_WEIGHT + (double)s->tests[j]));
        spreads[j] = at_most(at_least(expected(s, j, usual) / (spread * doubt), -6.0), 6.0);
    }
}

/* The share of its clean margin that a seed has kept. */
static inline float kept_margin(const float *margin, const float *clean, int64_t seed)
{
    return margin[seed] / (clean[seed] < 1e-12f ? 1e-12f : clean[seed]);
}

/* The value of a fault by the cell of its seed, values [MAX_SEED_FAULTS * MAX_SEEN_ONCE]: `_fault_values` in
 * search/arithmetic.py. */
static inline __attribute__((always_inline)) void find_fault_values(const struct seeds *s, double *values)
{
    for (int64_t cell = 0; cell < MAX_SEED_FAULTS * MAX_SEEN_ONCE; cell++) {
        double prior = PRIOR_TESTS / 2 * (1.0 / (1.0 + (double)(cell / MAX_SEEN_ONCE)));
        double is_new = (s->new_faults[cell] + prior) / (s->seen_faults[cell] + PRIOR_TESTS / 2);
        values[cell] = cell < MAX_SEEN_ONCE ? is_new * (1.0 + FIRST_FAULT_BONUS) : is_new;
    }
}

/* Weighted chances of a new fault in each seed's next tests, worth [depth, n_seeds]: `values` in search/arithmetic.py. */
static inline __attribute__((always_inline)) void find_worth(
    const struct seeds *s, const double *spreads, int64_t depth, int64_t n_corners, int has_faults, double *worth,
    double *frailties)
{
    double fault_values[MAX_SEED_FAULTS * MAX_SEEN_ONCE];
    find_fault_values(s, fault_values);
    for (int64_t answer = 0; answer < s->n_answers; answer++)
        frailties[answer] = frailty(s, answer);
    for (int64_t j = 0; j < s->n_seeds; j++) {
        double read = logistic(s->curve[0] + s->curve[1] * spreads[j] + frailties[s->answer_index[j]]);
        double known = ESTIMATE_WEIGHT + (double)s->tests[j];
        double chance = (ESTIMATE_WEIGHT * read + (double)s->broke[j]) / known;
        for (int64_t k = 0; k < depth; k++) {
            double further = (double)(s->ahead[j] + k), faults = rint((double)s->faults[j] + further * chance);
            int64_t cell = cell_of(faults < MAX_SEED_FAULTS ? (int64_t)faults : MAX_SEED_FAULTS, s->seen_once[j]);
            double value = chance * known / (known + further * (1.0 - chance)) * fault_values[cell];
            if (!has_faults) {
                float kept = kept_margin(s->margin, s->clean, j);
                value /= KEPT_MARGIN_OFFSET + (kept < 0.0f ? 0.0f : kept);
            }
            worth[k * s->n_seeds + j] = s->corners[j] + k < n_corners ? value : value * REPEAT_VALUE;
        }
    }
}

/* The value of a polynomial whose n coefficients start with that of the highest power. */
static inline __attribute__((always_inline)) double polynomial(const double *coefficients, int64_t n, double x)
{
    double value = coefficients[0];
    for (int64_t k = 1; k < n; k++)
        value = value * x + coefficients[k];
    return value;
}

/* Quantiles of the standard normal distribution between its quantiles of 13.5% and 86.5%, and below: those of Cephes. */
static inline __attribute__((always_inline)) double central_quantile(double chance)
{
    static const double P[] = {-5.99633501014107895267E1, 9.80010754185999661536E1, -5.66762857469070293439E1,
                               1.39312609387279679503E1, -1.23916583867381258016E0};
    static const double Q[] = {1.0, 1.95448858338141759834E0, 4.67627912898881538453E0, 8.63602421390890590575E1,
                               -2.25462687854119370527E2, 2.00260212380060660359E2, -8.20372256168333339912E1,
                               1.59056225126211695515E1, -1.18331621121330003142E0};
    double y = chance - 0.5, square = y * y;
    return (y + y * (square * polynomial(P, 5, square) / polynomial(Q, 9, square))) * 2.50662827463100050242;
}

static double tail_quantile(double chance)
{
    static const double P[] = {4.05544892305962419923E0, 3.15251094599893866154E1, 5.71628192246421288162E1,
                               4.40805073893200834700E1, 1.46849561928858024014E1, 2.18663306850790267539E0,
                               -1.40256079171354495875E-1, -3.50424626827848203418E-2, -8.57456785154685413611E-4};
    static const double Q[] = {1.0, 1.57799883256466749731E1, 4.53907635128879210584E1, 4.13172038254672030440E1,
                               1.50425385692907503408E1, 2.50464946208309415979E0, -1.42182922854787788574E-1,
                               -3.80806407691578277194E-2, -9.33259480895457427372E-4};
    double x = sqrt(-2.0 * log(chance)), z = 1.0 / x;
    return -(x - log(x) / x - z * polynomial(P, 9, z) / polynomial(Q, 9, z));
}

#define TAIL 0.13533528323661269189 /* exp(-2) */
#define LOW -1.1                    /* above its quantile */
#define KIND_PRIOR_FAULTS 6.0
#define RARE 1e-9

/* The kind with the largest sampled return for each test: `sample_kinds` in search/kinds.py.
 *
 * prior, cost, tried, paid [n or more]: of each kind; prefix: the hash of the words before the kind and the number of a
 * test. plain, best [n_tests] receive the best of the first n_plain kinds, and of the first n; all [n_all] are summed. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_choose_kinds(uint64_t prefix, int64_t n_tests, int64_t n_plain, int64_t n, int64_t n_all, const double *prior,
                         const double *cost, const double *tried, const double *paid, const int64_t *number,
                         int64_t *plain, int64_t *best)
{
    double average = (sum(paid, n_all) + 1.0) / (sum(tried, n_all) + PRIOR_TESTS);
    for (int64_t start = 0; start < n_tests; start += WORDS) {
        int64_t size = n_tests - start < WORDS ? n_tests - start : WORDS;
        double draw[WORDS], score[WORDS], highest[WORDS];
        for (int64_t k = 0; k < n; k++) {
            double expected = paid[k] + PRIOR_TESTS * average * prior[k] / cost[k];
            double mean = log(expected / (tried[k] + PRIOR_TESTS)), certainty = sqrt(expected + KIND_PRIOR_FAULTS);
            uint64_t shared = mixed(prefix ^ (uint64_t)k);
            for (int64_t t = 0; t < size; t++)
                draw[t] = uniform_of(mixed(shared ^ (uint64_t)number[start + t]));
            for (int64_t t = 0; t < size; t++) { /* a loop of its own, in which numbers are computed side by side */
                draw[t] = at_most(at_least(draw[t], RARE), 1.0 - RARE);
                score[t] = central_quantile(draw[t]);
            }
            for (int64_t t = 0; t < size; t++)
                if (draw[t] <= TAIL) /* below LOW, it cannot be the largest */
                    score[t] = k && LOW / certainty + mean < highest[t] ? -INFINITY : tail_quantile(draw[t]);
                else if (draw[t] > 1.0 - TAIL)
                    score[t] = -tail_quantile(1.0 - draw[t]);
            for (int64_t t = 0; t < size; t++) {
                score[t] = score[t] / certainty + mean;
                int is_best = k == 0 || score[t] > highest[t];
                highest[t] = is_best ? score[t] : highest[t];
                best[start + t] = is_best ? k : best[start + t];
            }
            if (k + 1 == n_plain)
                for (int64_t t = 0; t < size; t++)
                    plain[start + t] = best[start + t];
        }
    }
}

/* The seeds of the n tests that are worth most, up to depth of each seed: `_choose_seeds` in search/scheduled.py.
 *
 * prefix: the hash of the words before the number of a seed; n_corners: of theta, if each can be tried once only;
 * has_faults: whether any is known. spreads [n_seeds] receives the numbers above, position [n] the seeds, ascending;
 * scratch [2 * depth * n_seeds + n_answers] is overwritten. Returns 0, or 1 if a number is no answer. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
int32_t themis_choose_seeds(const struct seeds *s, double first_spread, uint64_t prefix, int64_t depth, int64_t n,
                            int64_t n_corners, int32_t has_faults, double *spreads, double *worth, int64_t *position)
{
    int64_t n_seeds = s->n_seeds;
    double *scratch = worth + depth * n_seeds;
    if (!are_below(s->answer_index, n_seeds, s->n_answers))
        return 1;
    find_spreads(s, first_spread, spreads);
    if (n == 0)
        return 0;
    find_worth(s, spreads, depth, n_corners, has_faults, worth, scratch + depth * n_seeds);
    for (int64_t j = 0; j < n_seeds; j++) { /* ties are broken at random */
        double factor = 1.0 + 1e-6 * uniform_of(mixed(prefix ^ (uint64_t)j));
        for (int64_t k = 0; k < depth; k++)
            scratch[k * n_seeds + j] = worth[k * n_seeds + j] *= factor;
    }
    int64_t low = 0, high = n_seeds * depth - 1;
    while (low < high) { /* Hoare's selection: number n - 1 in descending order finds its place */
        double pivot = scratch[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (scratch[i] > pivot)
                i++;
            while (pivot > scratch[j])
                j--;
            if (i <= j) {
                double other = scratch[i];
                scratch[i++] = scratch[j];
                scratch[j--] = other;
            }
        }
        if (n - 1 <= j)
            high = j;
        else if (n - 1 >= i)
            low = i;
        else
            break;
    }
    double least = scratch[n - 1];
    int64_t found = 0, n_equal = n;
    for (int64_t j = 0; j < n_seeds * depth; j++)
        n_equal -= worth[j] > least;
    for (int64_t j = 0; j < n_seeds; j++)
        for (int64_t k = 0; k < depth && found < n; k++) {
            double value = worth[k * n_seeds + j];
            if (value > least || (value == least && n_equal-- > 0))
                position[found++] = j;
        }
    return 0;
}

/* The kinds of proposals; the same as in search/kinds.py. */
enum { CORNER, SWEEP, BORROWED, FLIP, AGAIN, NEAR, UNIFORM };

/* The uses of random numbers, and the shares of the range; the same as in search/scheduled.py. */
enum { FOR_BORROWED = -1, FOR_DIMENSION = -2, FOR_STEP = -5, FOR_LEAD = -7, FOR_LEADING = -8, FOR_MOVE = -9 };
#define SEARCH_STREAM 1
#define BORROWED_JITTER (1.0 / 64)
#define N_LEADING_SEEDS 10

/* The box of theta, [n_dimensions] each, and where thetas are taken from. */
struct thetas {
    int64_t n_seeds, n_dimensions, n_faults;
    const float *low, *high, *identity, *width;
    const int64_t *answer;               /* [n_seeds], the clean answers */
    const float *clean;                  /* [n_seeds], margins */
    float *margin, *best;                /* [n_seeds], the smallest margins; their thetas [n_seeds, n_dimensions] */
    const float *fault_theta;            /* [n_faults, n_dimensions] */
    const int64_t *order, *fault_answer; /* [n_faults]: the faults by their seeds' clean answers; these answers */
};

static inline double drawn(uint64_t prefix, int64_t use, int64_t number)
{
    return uniform_of(mixed(mixed(prefix ^ (uint64_t)use) ^ (uint64_t)number));
}

/* Where `value` would be inserted into n ascending numbers, before equal ones, or after them. */
static int64_t insertion(const int64_t *numbers, int64_t n, int64_t value, int is_after)
{
    int64_t low = 0;
    while (n > 0) {
        int64_t half = n / 2;
        if (is_after ? numbers[low + half] <= value : numbers[low + half] < value) {
            low += half + 1;
            n -= half + 1;
        } else
            n = half;
    }
    return low;
}

/* The seeds that have kept the smallest shares of their margins; returns how many. */
static int64_t find_leads(const struct thetas *s, int64_t *leads)
{
    float kept[N_LEADING_SEEDS];
    int64_t n = 0;
    for (int64_t j = 0; j < s->n_seeds; j++) {
        float share = kept_margin(s->margin, s->clean, j);
        if (n == N_LEADING_SEEDS && !(share < kept[n - 1]))
            continue;
        int64_t k = n < N_LEADING_SEEDS ? n++ : n - 1;
        for (; k > 0 && share < kept[k - 1]; k--) {
            kept[k] = kept[k - 1];
            leads[k] = leads[k - 1];
        }
        kept[k] = share;
        leads[k] = j;
    }
    return n;
}

static inline float inside(const struct thetas *s, int64_t d, double theta)
{
    float moved = (float)theta;
    moved = moved < s->low[d] ? s->low[d] : moved;
    return moved > s->high[d] ? s->high[d] : moved;
}

/* Theta of each test by its kind, theta [n_tests, n_dimensions]: `_thetas` in search/scheduled.py.
 *
 * for_pick, for_theta: the hashes of the words before a use, or a dimension. Ascents start as thetas of the kind NEAR.
 * Returns 0, or 1 if an index is wrong. */
int32_t themis_thetas(const struct thetas *s, uint64_t for_pick, uint64_t for_theta, int64_t n_tests,
                      const int64_t *chosen, const int64_t *position, const int64_t *number, float *theta)
{
    int64_t n = s->n_dimensions, leads[N_LEADING_SEEDS], n_leads = find_leads(s, leads);
    if (!are_below(position, n_tests, s->n_seeds) || !are_below(s->order, s->n_faults, s->n_faults))
        return 1;
    for (int64_t t = 0; t < n_tests; t++, theta += n) {
        const float *from = s->best + position[t] * n;
        double step = 0.0;
        int64_t flipped = chosen[t] <= SWEEP ? n : -1; /* the dimension that goes to a bound; n stands for all */
        if (chosen[t] == BORROWED && s->n_faults) {
            int64_t low = insertion(s->fault_answer, s->n_faults, s->answer[position[t]], 0);
            int64_t high = insertion(s->fault_answer, s->n_faults, s->answer[position[t]], 1);
            if (low == high) {
                low = 0;
                high = s->n_faults;
            }
            low += (int64_t)(drawn(for_pick, FOR_BORROWED, number[t]) * (double)(high - low));
            from = s->fault_theta + s->order[low] * n;
            step = BORROWED_JITTER;
        } else if (chosen[t] == NEAR || chosen[t] > UNIFORM) {
            int64_t lead = leads[(int64_t)(drawn(for_pick, FOR_LEAD, number[t]) * (double)n_leads)];
            if (drawn(for_pick, FOR_LEADING, number[t]) < 0.5)
                from = s->best + lead * n;
            step = exp2(-(1.0 + 5.0 * drawn(for_pick, FOR_STEP, number[t])));
        } else if (chosen[t] == FLIP)
            flipped = (int64_t)(drawn(for_pick, FOR_DIMENSION, number[t]) * (double)n);
        for (int64_t d = 0; d < n; d++) {
            theta[d] = from[d];
            if (flipped == n || flipped == d) {
                int is_up = s->low[d] == s->identity[d] || /* a bound that is the identity is none */
                            (s->high[d] != s->identity[d] && drawn(for_pick, d, number[t]) < 0.5);
                theta[d] = is_up ? s->high[d] : s->low[d];
            } else if (chosen[t] == UNIFORM) {
                uint64_t hash = mixed(mixed(for_theta ^ (uint64_t)d) ^ SEARCH_STREAM);
                theta[d] = inside(s, d, s->low[d] + uniform_of(mixed(hash ^ (uint64_t)number[t])) * s->width[d]);
            } else if (step && (chosen[t] != BORROWED || (from[d] > s->low[d] && from[d] < s->high[d]))) {
                double move = step * (2.0 * drawn(for_pick, FOR_MOVE - d, number[t]) - 1.0);
                theta[d] = inside(s, d, from[d] + move * s->width[d]);
            }
        }
    }
    return 0;
}

/* Keeps the smallest margin of each seed, and theta [n_tests, n_dimensions] at which it was seen; of equal ones the last.
 *
 * Returns 0, or 1 if a position is no seed. */
int32_t themis_keep_least(const struct thetas *s, int64_t n_tests, const int64_t *position, const float *margin,
                          const float *theta)
{
    int64_t n = s->n_dimensions;
    if (!are_below(position, n_tests, s->n_seeds))
        return 1;
    for (int64_t t = n_tests - 1; t >= 0; t--)
        if (margin[t] < s->margin[position[t]]) {
            s->margin[position[t]] = margin[t];
            for (int64_t d = 0; d < n; d++)
                s->best[position[t] * n + d] = theta[t * n + d];
        }
    return 0;
}
#pragma GCC pop_options
