/* lab/: statistics against values worked out by hand or in long double, and the form
 * of results. */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lab/lab.h"

static float noise(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 40) / 16777216.0 * 20 - 10);
}

static void kl_of_the_same_bits_is_zero(void **state)
{
    float x[1000];
    uint64_t seed = 1;
    (void)state;
    for (int i = 0; i < 1000; i++)
        x[i] = noise(&seed);
    assert_true(lab_kl_bits(x, x, 1000) == 0);
    float y[1000];
    memcpy(y, x, sizeof x);
    assert_true(lab_kl_bits(x, y, 1000) == 0);
}

static void kl_by_hand(void **state)
{
    (void)state;
    float p[2] = {0, 0}, q[2] = {logf(3), 0}; /* 1/2 1/2 against 3/4 1/4 */
    assert_true(fabs(lab_kl_bits(p, q, 2) - (0.5 * log2(0.5 / 0.75) + 0.5)) < 1e-7);
    assert_true(fabs(lab_kl_bits(q, p, 2) - (0.75 * log2(1.5) + 0.25 * log2(0.5))) < 1e-7);
    for (int i = 0; i < 2; i++) /* a constant added to all logits is no difference */
        q[i] += 40;
    assert_true(fabs(lab_kl_bits(p, q, 2) - (0.5 * log2(0.5 / 0.75) + 0.5)) < 1e-6);
    float far[2] = {0, -2000}; /* a probability that is 0 in f64 */
    assert_true(isfinite(lab_kl_bits(far, p, 2)) && fabs(lab_kl_bits(far, p, 2) - 1) < 1e-12);
}

/* Of distributions that differ in the last bits nearly all of the plain sum cancels. */
static void kl_of_near_neighbours(void **state)
{
    enum { N = 4096 };
    static float p[N], q[N];
    uint64_t seed = 7;
    (void)state;
    for (int i = 0; i < N; i++) {
        p[i] = noise(&seed);
        q[i] = i % 3 ? p[i] : nextafterf(p[i], i % 2 ? 100.0f : -100.0f);
    }
    long double zp = 0, zq = 0, sum = 0;
    for (int i = 0; i < N; i++) {
        zp += expl((long double)p[i]);
        zq += expl((long double)q[i]);
    }
    for (int i = 0; i < N; i++) {
        long double a = expl((long double)p[i]) / zp, d = (long double)p[i] - (long double)q[i] - logl(zp) + logl(zq);
        sum += a * (d + expm1l(-d));
    }
    double got = lab_kl_bits(p, q, N), expected = (double)(sum / logl(2));
    assert_true(got > 0);
    assert_true(fabs(got - expected) < 1e-3 * expected);
}

static void log_probabilities(void **state)
{
    float x[64];
    uint64_t seed = 3;
    double sum = 0;
    (void)state;
    for (int i = 0; i < 64; i++)
        x[i] = noise(&seed);
    for (int i = 0; i < 64; i++)
        sum += exp(lab_log_prob(x, 64, i));
    assert_true(fabs(sum - 1) < 1e-12);
}

static void counting(void **state)
{
    (void)state;
    assert_int_equal(lab_argmax((float[]){1, 3, 2, 3}, 4), 1);
    assert_true(lab_match((int32_t[]){1, 2, 3, 4}, (int32_t[]){1, 0, 3, 0}, 4) == 0.5);
    char hex[17];
    lab_hash("", 0, hex); /* the vectors of FNV-1a's authors */
    assert_string_equal(hex, "cbf29ce484222325");
    lab_hash("foobar", 6, hex);
    assert_string_equal(hex, "85944171f73967e8");
}

static void text_of_any_bytes(void **state)
{
    static const struct {
        const char *in, *out;
    } cases[] = {{"plain", "plain"}, {"\xc3\xa4", "\xc3\xa4"}, {"a\xff" "b", "a\xef\xbf\xbd" "b"}, {"\xc3", "\xef\xbf\xbd"}, {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"}, {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *s = lab_text(cases[i].in, strlen(cases[i].in));
        assert_string_equal(json_string_value(s), cases[i].out);
        json_decref(s);
    }
}

static void check_cell(json_t *cell, int decimals, const char *expected)
{
    char text[64];
    lab_cell(cell, decimals, text, sizeof text);
    assert_string_equal(text, expected);
    json_decref(cell);
}

static void cells(void **state)
{
    (void)state;
    check_cell(json_real(0), 3, "0"); /* exactly; what only rounds to it is not */
    check_cell(json_real(0.0004), 3, "4e-04");
    check_cell(json_real(0.0006), 3, "0.001");
    check_cell(json_real(2.0 / 3), 2, "0.67");
    check_cell(json_real(0.1), -1, "0.1");
    check_cell(json_real(1.0 / 3), -1, "0.3333333333333333");
    check_cell(json_real(1234.5), -2, "1.23e+03");
    check_cell(json_integer(7), 3, "7");
    check_cell(json_true(), 0, "yes");
    check_cell(json_null(), 0, "-");
    check_cell(json_string("a\nb\t\x1b["), 0, "a\\nb\\t\\x1b[");
    check_cell(json_stringn("a\0b", 3), 0, "a\\x00b");
    char small[8];
    json_t *s = json_string("\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4");
    lab_cell(s, 0, small, sizeof small); /* cut between characters */
    assert_string_equal(small, "\xc3\xa4\xc3\xa4\xc3\xa4");
    json_decref(s);
}

static void a_row_keeps_its_shape(void **state)
{
    static const lab_column columns[] = {{"a", "A", 0}, {"b", "B", 2}, {"c", "C", 0}, {NULL, NULL, 0}};
    char *text = NULL;
    size_t n = 0;
    (void)state;
    json_t *r = json_pack("{s:[], s:[], s:[]}", "tables", "plots", "notes"), *t = lab_table(r, "t", "T", columns);
    lab_row(t, json_pack("[i, f, s]", 1, 2.5, "x\ty\\"));
    lab_row(t, json_pack("[i, f, s]", 1, (double)NAN, "z")); /* no number of JSON: a row of nulls */
    lab_row(t, json_pack("[i, o]", 2, lab_number(INFINITY)));
    lab_row(t, json_pack("[i, i, i, i]", 1, 2, 3, 4));
    FILE *f = open_memstream(&text, &n);
    lab_write_tsv(t, f);
    fclose(f);
    assert_string_equal(text, "a\tb\tc\n1\t2.5\tx\\ty\\\\\n\t\t\n2\t\t\n1\t2\t3\n");
    free(text);
    lab_check_failed(r, "row %d", 3);
    assert_true(json_is_true(json_object_get(r, "check_failed")));
    assert_string_equal(json_string_value(json_array_get(json_object_get(r, "notes"), 0)), "row 3");
    json_decref(r);
}

/* A file goes where its page does not: the units have to be in it. */
static void names_of_columns_have_units(void **state)
{
    static const lab_column columns[] = {{"kl_free", "KL, free, bits", 0},  {"match", "token match, %", 0},      {"part", "rank up to, % of d_head", 0},
                                         {"part2", "% of d_head, W_k", 0},  {"low", "ms, lower quartile", 0},     {"ms", "ms, median", 0},
                                         {"peak_mb", "peak, MB", 0},        {"at_hand", "break-even, MB/s", 0},   {"window", "B, tokens", 0},
                                         {"tokens", "tokens", 0},           {"ms2", "ms per token", 0},           {"steps", "of steps, counted", 0},
                                         {"new", "new tokens", 0},          {NULL, NULL, 0}};
    char *text = NULL;
    size_t n = 0;
    (void)state;
    json_t *r = json_pack("{s:[]}", "tables"), *t = lab_table(r, "t", "T", columns);
    FILE *f = open_memstream(&text, &n);
    lab_write_tsv(t, f);
    fclose(f);
    assert_string_equal(text, "kl_free_bits\tmatch_percent\tpart_percent\tpart2_percent\tlow_ms\tms\tpeak_mb\tat_hand_mb_s\twindow_tokens\ttokens\tms2\tsteps\tnew\n");
    free(text);
    json_decref(r);
}

/* A result from a file may hold anything: judging it makes rows or none, and no fault. */
static void judging_takes_anything(void **state)
{
    static const char *const experiments[] = {"generation", "patch", "perplexity", "hellaswag", "multiturn", "baselines", "sweep", "rank", "truncate", "latency"};
    static const char *const bodies[] = {
        "'x':1", "'tables':7", "'tables':[7,null,[]]", "'tables':[{'name':7}],'model':[],'settings':'no'", "'model':{'architecture':'gemma3','n_layers':'x'}",
        "'model':{'architecture':'llama','n_layers':30,'d_model':576,'d_head':0,'name':7},'tables':["
        "{'name':'generation','columns':7,'rows':[[1]]},{'name':'layers','columns':[{'key':7},7],'rows':7},"
        "{'name':'perplexity','columns':[{'key':'policy'},{'key':'perplexity'}],'rows':[['full',0],['window:64'],['kv-direct',1],[1,2,3],7,['window:32',-1]]},"
        "{'name':'hellaswag','columns':[{'key':'policy'},{'key':'acc_norm'},{'key':'acc_norm_error'},{'key':'tasks'}],'rows':[['full',-5,1e300,1e300],['full',1e308,1,0]]},"
        "{'name':'ways','columns':[{'key':'way'},{'key':'peak_mb'},{'key':'ratio'}],'rows':[['full',0,0],['kv-direct recompute',1e308,1e308],"
        "['kv-direct a way of a very long name, and longer yet, to the end of every buffer',1,1e308]]},"
        "{'name':'matrix','columns':[{'key':'method'},{'key':'match_free'}],'rows':[['tova',1e308],['kv-direct',-1e308]]},"
        "{'name':'ratios','columns':[{'key':'tokens'},{'key':'reading'},{'key':'at_hand'}],'rows':[[1,'RAM, cold',1e308],[1e308,'RAM, cold',0]]},"
        "{'name':'break_even','columns':[{'key':'at_hand'}],'rows':[[1e308]]},"
        "{'name':'summary','columns':[{'key':'form'},{'key':'which'},{'key':'mean'}],'rows':[['W_q^T W_k (d x d)','all',1e308],['W_q^T W_k (d x d)','one per KV head',1e308]]},"
        "{'name':'heads','columns':[{'key':'layer'},{'key':'rank_product'}],'rows':[[0,1e308],[0,-1e308]]},"
        "{'name':'windows','columns':[{'key':'method'},{'key':'window'},{'key':'match'}],'rows':[['window',256,1e308],['window',8,1e308],['kv-direct',8,1e308]]},"
        "{'name':'truncate','columns':[{'key':'what'},{'key':'rank'},{'key':'match'},{'key':'kl_free'}],'rows':[['K and V',64,1e308,1e308],['K and V',32,1,0]]}],"
        "'settings':{'new_tokens':1e308,'prompt_tokens':-1e308,'turns':1e308,'at':'all','what':'residual','layer':'all','donor':7}"};
    (void)state;
    for (size_t e = 0; e < sizeof experiments / sizeof experiments[0]; e++)
        for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
            char text[8192];
            json_error_t err;
            snprintf(text, sizeof text, "{'experiment':'%s',%s}", experiments[e], bodies[i]);
            for (char *p = text; *p; p++)
                *p = *p == '\'' ? '"' : *p;
            json_t *r = json_loads(text, 0, &err);
            assert_non_null(r);
            lab_judge(r);
            json_t *once = json_deep_copy(r);
            lab_judge(r);
            assert_true(json_is_array(json_object_get(r, "paper_rows")) && json_equal(once, r));
            json_decref(once);
            json_decref(r);
        }
    json_t *r = json_pack("{s:s, s:[i]}", "experiment", "of another day", "paper_rows", 1);
    lab_judge(r);
    lab_judge(NULL);
    assert_int_equal(json_array_size(json_object_get(r, "paper_rows")), 1);
    json_decref(r);
}

static void a_plot_of_nothing_is_refused(void **state)
{
    kvd_error err;
    static const lab_column columns[] = {{"a", "A", 0}, {"b", "B", 0}, {NULL, NULL, 0}};
    (void)state;
    json_t *r = json_pack("{s:[], s:[]}", "tables", "plots");
    lab_table(r, "t", "T", columns);
    lab_plot(r, "p", "P", "lines", "t", "a", "absent", NULL, NULL, 0);
    lab_plot(r, "q", "Q", "lines", "absent", "a", "b", NULL, NULL, 0);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(lab_draw(r, json_array_get(json_object_get(r, "plots"), i), "never.svg", &err), KVD_E_ARG);
    assert_int_equal(lab_draw(r, json_array_get(json_object_get(r, "plots"), 0), "never.gif", &err), KVD_E_ARG);
    json_decref(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kl_of_the_same_bits_is_zero), cmocka_unit_test(kl_by_hand),        cmocka_unit_test(kl_of_near_neighbours),
        cmocka_unit_test(log_probabilities),           cmocka_unit_test(counting),          cmocka_unit_test(text_of_any_bytes),
        cmocka_unit_test(cells),                       cmocka_unit_test(a_row_keeps_its_shape), cmocka_unit_test(names_of_columns_have_units), cmocka_unit_test(judging_takes_anything), cmocka_unit_test(a_plot_of_nothing_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
