#define _GNU_SOURCE
#include "cli.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LONG_THREADS = 256, LONG_CPU, LONG_CHUNK, LONG_BUDGET, LONG_KV_TOKENS, LONG_POLICY, LONG_KV_TYPE, LONG_STREAM,
    LONG_ACTIVATIONS, LONG_TEMP, LONG_TOP_K, LONG_TOP_P, LONG_MIN_P, LONG_REPEAT, LONG_PRESENCE, LONG_FREQUENCY,
    LONG_BIAS, LONG_SEED, LONG_STOP, LONG_IGNORE_EOS, LONG_RAW, LONG_SYSTEM, LONG_TEMPLATE, LONG_JSON, LONG_RECEIPT,
    LONG_QUIET, LONG_NO_BOS, LONG_SPECIAL, LONG_CHUNKS, LONG_QUICK, LONG_FULL, LONG_INJECT, LONG_NO_THINK,
    LONG_STATS, LONG_PROFILE, LONG_EVICT_TO, LONG_SPILL_DIR, LONG_CONTEXT, LONG_RECALIBRATE, LONG_ROPE, LONG_POSITIONS,
    LONG_POLICIES, LONG_TASKS, LONG_CHUNK_TOKENS, LONG_FIRST_SCORED, LONG_DONOR, LONG_RECIPIENT, LONG_LAYER, LONG_HEAD,
    LONG_AT, LONG_WHAT, LONG_HELLASWAG, LONG_AGAIN, LONG_HELP
};

typedef struct {
    const char *name;
    int value;
    bool has_argument;
    unsigned group;
    const char *argument, *help;
} option_row;

static const option_row rows[] = {
    {"m", 'm', true, OPT_MODEL, "FILE", "model, a GGUF file"},
    {"p", 'p', true, OPT_PROMPT, "TEXT", "prompt"},
    {"f", 'f', true, OPT_PROMPT, "FILE", "read the text from a file (else standard input)"},
    {"f", 'f', true, OPT_EVAL, "FILE", "perplexity: a text; hellaswag: tasks, as 6 lines each or JSONL"},
    {"f", 'f', true, OPT_LAB_TEXT, "FILE", "a text instead of the experiment's own"},
    {"f", 'f', true, OPT_REPORT, "FILE", "text for perplexity and baselines (the paper: WikiText-2, raw test split)"},
    {"m", 'm', true, OPT_REPORT, "FILE", "model, a GGUF file; may be repeated"},
    {"n", 'n', true, OPT_GENERATE | OPT_PLAN, "N", "new tokens at most; 256 (chat: 512 an answer); -1: until the end token or T_max"},
    {"raw", LONG_RAW, false, OPT_RAW, NULL, "the prompt as it is, without chat template"},
    {"system", LONG_SYSTEM, true, OPT_GENERATE, "TEXT", "system message of the chat template"},
    {"template", LONG_TEMPLATE, true, OPT_GENERATE, "NAME", "chat template by name instead of the file's"},
    {"no-think", LONG_NO_THINK, false, OPT_GENERATE, NULL, "Qwen3, DeepSeek-R1: an answer without thoughts"},
    {"stats", LONG_STATS, false, OPT_CHAT, NULL, "tokens, rates and what was recomputed after each answer"},
    {"kv-budget", LONG_BUDGET, true, OPT_MEMORY, "SIZE", "context memory, e.g. 64M; half of what is available"},
    {"kv-tokens", LONG_KV_TOKENS, true, OPT_MEMORY, "B", "keep K and V of about the last B positions; 0: of none"},
    {"policy", LONG_POLICY, true, OPT_MEMORY, "NAME", "kv-direct; full: keep everything; lossy, to compare: window, streaming-llm, h2o, snapkv, tova"},
    {"positions", LONG_POSITIONS, true, OPT_MEMORY, "HOW", "lossy policies: original, or renumber what is kept"},
    {"evict-to", LONG_EVICT_TO, true, OPT_MEMORY, "TIER", "auto, recompute, disk: where evicted K and V come from again"},
    {"spill-dir", LONG_SPILL_DIR, true, OPT_MEMORY | OPT_LAB | OPT_REPORT, "DIR", "folder of the disk tier; the user's cache folder"},
    {"recalibrate", LONG_RECALIBRATE, false, OPT_MEMORY, NULL, "measure this machine again for the planner"},
    {"context", LONG_CONTEXT, true, OPT_PLAN, "N", "tokens of prompt and answer"},
    {"o", 'o', true, OPT_PLAN, "FILE", "write the curve: a drawing as .svg or .png, else TSV"},
    {"o", 'o', true, OPT_LAB, "FILE", "write tables as .tsv, all as .json, plots as .svg or .png"},
    {"o", 'o', true, OPT_REPORT, "DIR", "folder of the report; what is there already is not run again"},
    {"n", 'n', true, OPT_LAB_NEW, "N", "tokens to generate, instead of the experiment's own number"},
    {"policies", LONG_POLICIES, true, OPT_POLICIES, "LIST", "e.g. full,kv-direct:64,window:64,h2o:128:renumber; eval: paper for the paper's"},
    {"donor", LONG_DONOR, true, OPT_PATCH, "TEXT", "prompt whose residual is put in; the paper's"},
    {"recipient", LONG_RECIPIENT, true, OPT_PATCH, "TEXT", "prompt that it is put into; the paper's"},
    {"layer", LONG_LAYER, true, OPT_PATCH, "L", "one layer; all"},
    {"at", LONG_AT, true, OPT_PATCH, "WHERE", "last: at the last position; all: at every position"},
    {"what", LONG_WHAT, true, OPT_PATCH, "WHAT", "residual; kv: keys and values"},
    {"head", LONG_HEAD, true, OPT_PATCH, "H", "of --what kv: one KV head; all"},
    {"kv-type", LONG_KV_TYPE, true, OPT_NUMBERS, "TYPE", "f16, bf16, f32"},
    {"stream", LONG_STREAM, true, OPT_NUMBERS, "TYPE", "residual stream: f32, f16, bf16"},
    {"activations", LONG_ACTIVATIONS, true, OPT_NUMBERS, "KIND", "auto (8 bit with quantised weights) or f32"},
    {"threads", LONG_THREADS, true, OPT_MACHINE, "N", "threads; as many as there are CPUs"},
    {"cpu", LONG_CPU, true, OPT_MACHINE, "ISA", "auto, scalar, avx2, avx512, neon"},
    {"chunk", LONG_CHUNK, true, OPT_MACHINE, "N", "rows of a pass computed together; 256"},
    {"temp", LONG_TEMP, true, OPT_GENERATE, "X", "temperature; 0: greedy"},
    {"top-k", LONG_TOP_K, true, OPT_GENERATE, "N", "40; 0: off"},
    {"top-p", LONG_TOP_P, true, OPT_GENERATE, "X", "0.95; 1: off"},
    {"min-p", LONG_MIN_P, true, OPT_GENERATE, "X", "0.05; 0: off"},
    {"repeat-penalty", LONG_REPEAT, true, OPT_GENERATE, "X", "1: off"},
    {"presence-penalty", LONG_PRESENCE, true, OPT_GENERATE, "X", "0: off"},
    {"frequency-penalty", LONG_FREQUENCY, true, OPT_GENERATE, "X", "0: off"},
    {"logit-bias", LONG_BIAS, true, OPT_GENERATE, "ID:X", "add X to a token's logit; may be repeated"},
    {"seed", LONG_SEED, true, OPT_GENERATE, "N", "0"},
    {"stop", LONG_STOP, true, OPT_GENERATE, "TEXT", "end when this text appears; may be repeated"},
    {"ignore-eos", LONG_IGNORE_EOS, false, OPT_GENERATE, NULL, "go on after end tokens"},
    {"no-bos", LONG_NO_BOS, false, OPT_TEXT, NULL, "add no BOS token"},
    {"special", LONG_SPECIAL, false, OPT_TEXT, NULL, "control tokens are parsed in the prompt and shown in the text"},
    {"chunks", LONG_CHUNKS, true, OPT_EVAL, "N", "perplexity: the first N chunks; all"},
    {"chunk-tokens", LONG_CHUNK_TOKENS, true, OPT_EVAL, "N", "perplexity: tokens of a chunk; 512"},
    {"first-scored", LONG_FIRST_SCORED, true, OPT_EVAL, "N", "perplexity: the first token of a chunk that counts; 257"},
    {"tasks", LONG_TASKS, true, OPT_EVAL, "N", "hellaswag: the first N tasks; all"},
    {"hellaswag", LONG_HELLASWAG, true, OPT_REPORT, "FILE", "HellaSwag tasks"},
    {"again", LONG_AGAIN, true, OPT_REPORT, "NAME", "run this experiment again; may be repeated; all: each"},
    {"quick", LONG_QUICK, false, OPT_VERIFY | OPT_LAB | OPT_REPORT, NULL, "fewer lengths and combinations"},
    {"full", LONG_FULL, false, OPT_VERIFY | OPT_REPORT, NULL, "more combinations"},
    {"rope", LONG_ROPE, true, OPT_VERIFY, "HOW", "absolute; window-relative also shows the paper's Eq. 16 on sliding layers"},
    {"inject", LONG_INJECT, true, OPT_VERIFY, "LAYER:POS", "test builds: disturb one value by one ulp"},
    {"p", 'p', true, OPT_BENCH, "LIST", "prompt lengths, e.g. 128,512; 512; 0: none"},
    {"n", 'n', true, OPT_BENCH, "LIST", "decode lengths; 64; 0: none"},
    {"d", 'd', true, OPT_BENCH, "LIST", "depths: tokens of context before the test; 0"},
    {"r", 'r', true, OPT_BENCH, "N", "repetitions; 3"},
    {"profile", LONG_PROFILE, false, OPT_BENCH, NULL, "show where the passes spend their time"},
    {"json", LONG_JSON, false, OPT_JSON, NULL, "one JSON object on standard output"},
    {"receipt", LONG_RECEIPT, false, OPT_OUTPUT, NULL, "print the receipt"},
    {"quiet", LONG_QUIET, false, OPT_OUTPUT, NULL, "nothing on standard error but errors"},
    {"help", LONG_HELP, false, ~0u, NULL, "this text"},
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

int cli_fail(int exit_code, const char *format, ...)
{
    char line[1024];
    va_list ap;
    va_start(ap, format);
    vsnprintf(line, sizeof line, format, ap);
    va_end(ap);
    size_t n = strlen(line);
    for (size_t i = 0, k; i < n; i += k ? k : 1) { /* names of files may hold anything: still one line, and no commands to a terminal */
        k = lab_utf8(line + i, n - i);
        if (lab_is_control(line + i, k))
            memset(line + i, '?', k);
    }
    cli_progress_clear();
    fprintf(stderr, "kvd: %s\n", line);
    return exit_code;
}

int cli_error(const char *what, const kvd_error *err)
{
    const char *text = err->message[0] ? err->message : kvd_error_text(err->code);
    return cli_fail(kvd_error_exit(err->code), "%s%s%s", what, *what ? ": " : "", text);
}

int cli_file_error(const char *path, const kvd_error *err)
{
    return cli_error(strstr(err->message, path) ? "" : path, err);
}

int64_t cli_bytes(const char *text)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || errno || !(v >= 0) || strpbrk(text, "xXnN"))
        return -1;
    double unit = 1;
    switch (*end) {
    case 'k': case 'K': unit = 1024.0; end++; break;
    case 'm': case 'M': unit = 1024.0 * 1024; end++; break;
    case 'g': case 'G': unit = 1024.0 * 1024 * 1024; end++; break;
    case 't': case 'T': unit = 1024.0 * 1024 * 1024 * 1024; end++; break;
    default: break;
    }
    if (unit > 1 && *end == 'i')
        end++;
    if (*end == 'B')
        end++;
    return *end || v * unit > 0x1p60 ? -1 : (int64_t)(v * unit);
}

const char *cli_size(int64_t bytes, char *buf)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    int u = 0;
    while (v >= 1024 && u < 4) {
        v /= 1024;
        u++;
    }
    snprintf(buf, 32, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return buf;
}

static bool integer(const char *text, int64_t min, int64_t max, int64_t *out)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < min || v > max)
        return false;
    *out = v;
    return true;
}

static bool real(const char *text, float *out)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v - v == 0) || v > 1e30 || v < -1e30)
        return false;
    *out = (float)v;
    return true;
}

/* Index of text in a list ended by NULL, or -1. */
static int choice(const char *text, const char *const *list)
{
    for (int i = 0; list[i]; i++)
        if (!strcmp(text, list[i]))
            return i;
    return -1;
}

static bool float_type(const char *text, kvd_float_type *out)
{
    int i = choice(text, (const char *const[]){"f16", "bf16", "f32", NULL});
    if (i >= 0)
        *out = (kvd_float_type)i;
    return i >= 0;
}

static bool pair(const char *text, int64_t *a, char *rest, size_t size)
{
    const char *colon = strchr(text, ':');
    if (!colon || (size_t)(colon - text) >= size)
        return false;
    memcpy(rest, text, (size_t)(colon - text));
    rest[colon - text] = 0;
    if (!integer(rest, 0, INT_MAX, a) || strlen(colon + 1) >= size)
        return false;
    strcpy(rest, colon + 1);
    return true;
}

static bool apply_machine(cli *c, int value, const char *a)
{
    int64_t n;
    int i;
    switch (value) {
    case LONG_THREADS:
        if (!integer(a, 1, 256, &n))
            return false;
        c->mo.n_threads = (int)n;
        return true;
    case LONG_CHUNK:
        if (!integer(a, 1, 4096, &n))
            return false;
        c->mo.chunk_tokens = (int)n;
        return true;
    case LONG_CPU:
        i = choice(a, (const char *const[]){"auto", "scalar", "avx2", "avx512", "neon", NULL});
        c->mo.isa = (kvd_isa)i;
        return i >= 0;
    case LONG_BUDGET:
        c->mo.kv_budget_bytes = cli_bytes(a);
        c->budget_given = true;
        return c->mo.kv_budget_bytes > 0;
    case LONG_KV_TOKENS:
        return integer(a, 0, INT64_MAX / 4, &c->so.kv_tokens);
    case LONG_POLICY:
        i = choice(a, (const char *const[]){"kv-direct", "full", "window", "streaming-llm", "h2o", "snapkv", "tova", NULL});
        c->so.policy = (kvd_policy)i;
        c->policy_given = true;
        return i >= 0;
    case LONG_POSITIONS:
        i = choice(a, (const char *const[]){"original", "renumber", NULL});
        c->so.positions = (kvd_positions)i;
        c->positions_given = true;
        return i >= 0;
    case LONG_EVICT_TO:
        c->evict_given = true;
        i = choice(a, (const char *const[]){"auto", "recompute", "disk", NULL});
        c->so.evict_to = (kvd_evict_to)i;
        return i >= 0;
    case LONG_SPILL_DIR:
        c->so.spill_dir = a;
        return *a != 0;
    case LONG_KV_TYPE:
        c->kv_type_given = true;
        return float_type(a, &c->so.kv_type);
    case LONG_STREAM:
        c->stream_given = true;
        return float_type(a, &c->so.stream);
    case LONG_ACTIVATIONS:
        i = choice(a, (const char *const[]){"auto", "f32", NULL});
        c->mo.activations_f32 = i == 1;
        return i >= 0;
    default:
        return false;
    }
}

static bool apply_generate(cli *c, int value, const char *a)
{
    kvd_sampling *s = &c->go.sampling;
    int64_t n;
    char rest[64];
    switch (value) {
    case 'n':
        c->n_given = true;
        return integer(a, -1, INT64_MAX / 4, &c->go.max_tokens) && c->go.max_tokens != 0;
    case LONG_TEMP:
        return real(a, &s->temperature) && s->temperature >= 0;
    case LONG_TOP_K:
        if (!integer(a, 0, INT_MAX, &n))
            return false;
        s->top_k = (int32_t)n;
        return true;
    case LONG_TOP_P:
        return real(a, &s->top_p) && s->top_p > 0 && s->top_p <= 1;
    case LONG_MIN_P:
        return real(a, &s->min_p) && s->min_p >= 0 && s->min_p <= 1;
    case LONG_REPEAT:
        return real(a, &s->repeat_penalty) && s->repeat_penalty > 0;
    case LONG_PRESENCE:
        return real(a, &s->presence_penalty);
    case LONG_FREQUENCY:
        return real(a, &s->frequency_penalty);
    case LONG_SEED:
        if (!integer(a, 0, INT64_MAX, &n))
            return false;
        s->seed = (uint64_t)n;
        return true;
    case LONG_BIAS:
        if (s->n_bias == 256 || !pair(a, &n, rest, sizeof rest) || !real(rest, &c->bias[s->n_bias].bias))
            return false;
        c->bias[s->n_bias++].id = (int32_t)n;
        return true;
    case LONG_STOP:
        if (!*a || c->go.n_stop == 32)
            return false;
        c->stop[c->go.n_stop++] = a;
        return true;
    case LONG_IGNORE_EOS:
        return c->go.ignore_end = true;
    default:
        return false;
    }
}

/* A number, or "all" for -1. */
static bool number_or_all(const char *a, int *out)
{
    int64_t n = -1;
    bool ok = !strcmp(a, "all") || integer(a, 0, INT_MAX, &n);
    *out = (int)n;
    return ok;
}

static bool apply_lab(cli *c, int value, const char *a)
{
    int i;
    switch (value) {
    case LONG_POLICIES: c->policies = a; return *a != 0;
    case LONG_CHUNKS: return integer(a, 1, INT64_MAX / 4096, &c->chunks);
    case LONG_TASKS: return integer(a, 1, INT64_MAX / 4096, &c->tasks);
    case LONG_CHUNK_TOKENS: return integer(a, 2, 1 << 20, &c->chunk_tokens);
    case LONG_FIRST_SCORED: return integer(a, 1, 1 << 20, &c->first_scored);
    case LONG_DONOR: c->donor = a; return *a != 0;
    case LONG_RECIPIENT: c->recipient = a; return *a != 0;
    case LONG_LAYER: return number_or_all(a, &c->layer);
    case LONG_HEAD: return number_or_all(a, &c->head);
    case LONG_AT:
        i = choice(a, (const char *const[]){"last", "all", NULL});
        c->at_all = i == 1;
        return i >= 0;
    case LONG_WHAT:
        i = choice(a, (const char *const[]){"residual", "kv", NULL});
        c->patch_kv = i == 1;
        return i >= 0;
    case LONG_HELLASWAG: c->hellaswag = a; return *a != 0;
    case LONG_AGAIN:
        if (c->n_again == CLI_AGAIN)
            return false;
        c->again[c->n_again++] = a;
        return true;
    default:
        return false;
    }
}

static bool apply(cli *c, int value, const char *a)
{
    int64_t n;
    char rest[64];
    switch (value) {
    case 'm':
        if (c->n_models == CLI_MODELS)
            return false;
        c->models[c->n_models++] = c->model = a;
        return true;
    case 'p': c->prompt = a; return true;
    case 'f': c->file = a; return true;
    case LONG_RAW: return c->raw = true;
    case LONG_NO_THINK: return c->no_think = true;
    case LONG_STATS: return c->stats = true;
    case LONG_SYSTEM: c->system = a; return true;
    case LONG_TEMPLATE: c->template_name = a; return true;
    case LONG_JSON: return c->json = true;
    case LONG_RECEIPT: return c->receipt = true;
    case LONG_QUIET: return c->quiet = true;
    case LONG_NO_BOS: return c->no_bos = true;
    case LONG_SPECIAL: return c->special = c->go.special = true;
    case LONG_QUICK: return c->quick = true;
    case LONG_FULL: return c->full = true;
    case LONG_ROPE: return (c->window_relative = !strcmp(a, "window-relative")) || !strcmp(a, "absolute");
    case LONG_PROFILE: return c->profile = true;
    case LONG_RECALIBRATE: return c->recalibrate = true;
    case LONG_CONTEXT: return integer(a, 1, INT64_MAX / 4, &c->context);
    case 'o': c->output = a; return true;
    case LONG_INJECT:
        if (!pair(a, &n, rest, sizeof rest) || !integer(rest, 0, INT_MAX, &c->inject_pos))
            return false;
        c->inject_layer = (int)n;
        return true;
    default:
        return apply_machine(c, value, a) || apply_generate(c, value, a) || apply_lab(c, value, a);
    }
}

/* The short options that mean something else to bench. */
static bool apply_bench(cli *c, int value, const char *a)
{
    switch (value) {
    case 'p': c->prompt = a; return true;
    case 'n': c->new_tokens = a; return true;
    case 'd': c->depths = a; return true;
    default: return integer(a, 1, 1000, &c->repetitions);
    }
}

static void help(const char *command, unsigned groups)
{
    printf("usage: kvd %s [options]\n", command);
    for (int i = 0; i < N_ROWS; i++)
        if (rows[i].group & groups) {
            char left[64];
            snprintf(left, sizeof left, "%s%s %s", rows[i].name[1] ? "--" : "-", rows[i].name, rows[i].argument ? rows[i].argument : "");
            printf("  %-24s %s\n", left, rows[i].help);
        }
    puts("SIZE: bytes, or with K, M, G, T (powers of 1024).");
}

/* The row of an option; of two with the same letter the one the command takes. */
static const option_row *find(int value, unsigned groups)
{
    const option_row *r = NULL;
    for (int i = 0; i < N_ROWS; i++)
        if (rows[i].value == value && (!r || (rows[i].group & groups)))
            r = &rows[i];
    return r;
}

bool cli_lossy(kvd_policy p) { return p != KVD_POLICY_KV_DIRECT && p != KVD_POLICY_FULL; }

/* What goes with a lossy policy and what does not. */
static int check_policy(const cli *c)
{
    enum { LEAST = 8 }; /* kvd.h */
    if (!cli_lossy(c->so.policy))
        return c->positions_given ? cli_fail(EXIT_USAGE, "--positions is for lossy policies (docs/baselines.md)") : 0;
    if (c->so.kv_tokens < LEAST)
        return cli_fail(EXIT_USAGE, "a lossy --policy needs --kv-tokens %d or more: what it keeps", LEAST);
    if (c->evict_given)
        return cli_fail(EXIT_USAGE, "a lossy --policy forgets: --evict-to does not go with it");
    return 0;
}

int cli_parse(cli *c, int argc, char **argv, const char *command, unsigned groups, int max_words)
{
    struct option longs[N_ROWS + 1];
    int n = 0;
    *c = (cli){.inject_layer = -1, .repetitions = 3, .layer = -1, .head = -1};
    kvd_model_options_defaults(&c->mo);
    kvd_session_options_defaults(&c->so);
    kvd_generate_options_defaults(&c->go);
    for (int i = 0; i < N_ROWS; i++)
        if (rows[i].name[1])
            longs[n++] = (struct option){rows[i].name, rows[i].has_argument, NULL, rows[i].value};
    longs[n] = (struct option){0};
    opterr = 0;
    optind = 1;
    for (int v; (v = getopt_long(argc, argv, ":m:p:f:n:d:r:o:h", longs, NULL)) != -1;) {
        if (v == 'h' || v == LONG_HELP) {
            help(command, groups);
            exit(cli_close_stdout());
        }
        if (v == '?' || v == ':')
            return cli_fail(EXIT_USAGE, v == ':' ? "%s needs a value (kvd %s --help)" : "unknown option %s (kvd %s --help)",
                            argv[optind - 1], command);
        const option_row *r = find(v, groups);
        if (!(r->group & groups))
            return cli_fail(EXIT_USAGE, "kvd %s takes no %s%s (kvd %s --help)", command, r->name[1] ? "--" : "-", r->name, command);
        if (!((groups & OPT_BENCH) && v < 256 && strchr("pndr", v) ? apply_bench(c, v, optarg) : apply(c, v, optarg)))
            return cli_fail(EXIT_USAGE, "%s%s: \"%.60s\" is not a valid value (%s)", r->name[1] ? "--" : "-", r->name,
                            optarg ? optarg : "", r->help);
    }
    for (; optind < argc; optind++) {
        if (c->n_words == max_words)
            return cli_fail(EXIT_USAGE, "unexpected argument \"%.60s\" (kvd %s --help)", argv[optind], command);
        c->words[c->n_words++] = argv[optind];
    }
    c->go.stop = c->stop;
    c->go.sampling.bias = c->bias;
    if ((groups & OPT_MODEL) && !c->model)
        return cli_fail(EXIT_USAGE, "no model: -m FILE (kvd %s --help)", command);
    if (c->prompt && c->file)
        return cli_fail(EXIT_USAGE, "-p and -f exclude each other");
    if (c->so.policy == KVD_POLICY_FULL && c->so.kv_tokens >= 0)
        return cli_fail(EXIT_USAGE, "--policy full keeps everything: --kv-tokens does not go with it");
    return check_policy(c);
}
