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
    return 1;
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
 * made from the uniform numbers j and half + j, as is number half + j. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void themis_normal(const int64_t *seed, int64_t n_tests, int64_t drawn, int64_t n, float *out)
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
    }
}
#pragma GCC pop_options

/* The answer of each test to a classification, and its margin: the same steps as `_compare` in oracle/classes.py.
 *
 * scores [n_tests, n]; reference [n_tests], the classes that the tests should keep; outcome, margin [n_tests]. Returns
 * how many references are no class; these tests are left out. */
int64_t themis_verdict(const float *scores, const int64_t *reference, int64_t n_tests, int64_t n, int64_t *outcome,
                    float *margin)
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
                    ((double *)out)[first + j * next_column] = (double)(int64_t)(state[j] >> 11) * 0x1p-53;
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
