/* kvd verify: prove the guarantees on a model, on this machine.
 *
 *   1  K and V made from the residual stream, per layer, against what attention
 *      read; and all of them dropped and rebuilt               verify_kv.c
 *   2  greedy tokens cached against from scratch               verify_runs.c
 *   3  receipts over budgets, chunks, threads, instruction sets verify_runs.c
 *
 * The table grows on standard output as results come; --json prints one object at
 * the end. Exit 0: all that must be equal is equal; 1: something is not; 5: nothing
 * could be compared for non-finite values; 130: interrupted. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "verify.h"

const char *verify_type_name(kvd_float_type t)
{
    return t == KVD_TYPE_F16 ? "f16" : t == KVD_TYPE_BF16 ? "bf16" : "f32";
}

static bool progress_shown; /* only then may the line be wiped: the table may stand on it */

static void clear_progress(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}

void verify_progress(verify *v, const char *format, ...)
{
    va_list ap;
    if (v->c->quiet || !isatty(STDERR_FILENO))
        return;
    clear_progress();
    fprintf(stderr, "[%.0f s] ", cli_seconds() - v->begun);
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fflush(stderr);
    progress_shown = true;
}

void verify_say(const verify *v, const char *format, ...)
{
    va_list ap;
    if (v->c->json)
        return;
    clear_progress();
    va_start(ap, format);
    vprintf(format, ap);
    va_end(ap);
    fflush(stdout);
}

int verify_on_pass(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed)
{
    (void)ctx, (void)done, (void)total, (void)rows, (void)recomputed;
    return cli_interrupted();
}

int verify_error(int rc, const kvd_error *err)
{
    clear_progress();
    return rc == KVD_E_CANCELLED || cli_interrupted() ? EXIT_INTERRUPTED
           : rc == KVD_E_NOMEM && !err->code          ? cli_fail(EXIT_RESOURCES, "out of memory")
                                                      : cli_error("", err);
}

static int inject(const verify *v)
{
    kvd_error err;
    if (v->c->inject_layer < 0)
        return 0;
    if (kvd_lab_inject(v->m, v->c->inject_layer, v->c->inject_pos, &err))
        return cli_fail(EXIT_USAGE, "--inject: %s", err.message);
    return 0;
}

int verify_load(verify *v, const kvd_model_options *mo)
{
    kvd_error err;
    const kvd_model_options *old = &v->loaded;
    if (v->m && mo->n_threads == old->n_threads && mo->isa == old->isa && mo->chunk_tokens == old->chunk_tokens)
        return cli_interrupted() ? EXIT_INTERRUPTED : 0;
    verify_progress(v, "loading");
    kvd_model_free(&v->m);
    int rc = kvd_model_load(&v->m, v->c->model, mo, &err);
    clear_progress();
    if (rc)
        return cli_file_error(v->c->model, &err);
    v->loaded = *mo;
    kvd_model_get_info(v->m, &v->info);
    return inject(v);
}

/* Load, find out how much text is needed, and whether --inject lies within it. */
static int prepare(verify *v)
{
    int code = verify_load(v, &v->c->mo);
    if (code)
        return code;
    v->n_ids = verify_positions(v);
    if (v->c->inject_layer >= 0 && v->c->inject_pos >= v->n_ids)
        return cli_fail(EXIT_USAGE, "--inject: position %lld is not tested, 0..%lld are", (long long)v->c->inject_pos,
                        (long long)v->n_ids - 1);
    json_object_set_new(v->out, "model", cli_json_model(v->m));
    json_object_set_new(v->out, "cpu", json_string(v->info.isa));
    json_object_set_new(v->out, "threads", json_integer(v->info.n_threads));
    json_object_set_new(v->out, "chunk", json_integer(v->loaded.chunk_tokens));
    const char *name = *v->info.name ? v->info.name : v->c->model;
    if (!v->c->json)
        cli_put_text(stdout, name, strlen(name)); /* a file may call itself anything */
    verify_say(v, " (%s), fingerprint %s\n%s, %d threads, chunks of %d%s\n\n", v->info.architecture,
               v->info.fingerprint, v->info.isa, v->info.n_threads, v->loaded.chunk_tokens,
               v->c->inject_layer >= 0 ? ", WITH AN INJECTED FAULT" : "");
    return verify_prompt(v->m, v->n_ids, &v->ids);
}

/* The last lines, and the exit code. */
static int conclude(verify *v, int code)
{
    double s = cli_seconds() - v->begun;
    const char *verdict = code == EXIT_INTERRUPTED ? "interrupted"
                          : v->mismatches          ? "fail"
                          : v->matches             ? "pass"
                                                   : "numeric error";
    if (code && code != EXIT_INTERRUPTED)
        return code;
    if (!code)
        code = v->mismatches ? EXIT_CHECK : v->matches ? EXIT_OK : EXIT_NUMERIC_ERROR;
    if (v->c->json) {
        json_object_set_new(v->out, "verdict", json_string(verdict));
        json_object_set_new(v->out, "matches", json_integer(v->matches));
        json_object_set_new(v->out, "mismatches", json_integer(v->mismatches));
        json_object_set_new(v->out, "numeric_errors", json_integer(v->numeric_errors));
        json_object_set_new(v->out, "seconds", json_real(s));
        clear_progress();
        int printed = cli_print_json(json_incref(v->out));
        return printed ? printed : code;
    }
    verify_say(v, "\n%s: %lld comparisons equal, %lld not", v->mismatches ? "FAIL" : code == EXIT_OK ? "PASS" : verdict,
               (long long)v->matches, (long long)v->mismatches);
    if (v->numeric_errors)
        verify_say(v, ", %lld ended by a numeric error (neither)", (long long)v->numeric_errors);
    verify_say(v, "; %.0f s\n", s);
    int closed = cli_close_stdout();
    return closed ? closed : code;
}

int cmd_verify(int argc, char **argv)
{
    cli c;
    int code = cli_parse(&c, argc, argv, "verify", OPT_MODEL | OPT_MACHINE | OPT_VERIFY | OPT_JSON | OPT_OUTPUT, 0);
    if (code)
        return code;
    if (c.quick && c.full)
        return cli_fail(EXIT_USAGE, "--quick and --full exclude each other");
    verify v = {.c = &c, .out = json_object(), .begun = cli_seconds()};
    json_object_set_new(v.out, "mode", json_string(c.quick ? "quick" : c.full ? "full" : "default"));
    cli_catch_interrupt();
    code = prepare(&v);
    code = code ? code : verify_reconstruction(&v);
    if (c.window_relative)
        code = code ? code : verify_rope(&v);
    code = code ? code : verify_generation(&v);
    code = code ? code : verify_receipts(&v);
    code = conclude(&v, code);
    json_decref(v.out);
    free(v.ids);
    kvd_model_free(&v.m);
    return code;
}
