/* lab: experiments that claim exactness notice when it does not hold, give up cleanly
 * when they are told to, and continue conversations as the chat template would.
 *
 * The fault is one flipped bit of one stored K (kvd_lab_inject), put in by the progress
 * callback when the exact way begins, after the run that it is compared with. */
#include "tiny.h"

#include "lab/runs.h"
#include "lab/texts.h"

typedef struct {
    kvd_model *m;
    const char *at; /* inject when this is under way; NULL: never */
    int64_t calls, cancel_at;
} hook;

static int tick(void *ctx, const char *what, int64_t done, int64_t total)
{
    hook *k = ctx;
    kvd_error err;
    (void)done, (void)total;
    if (what && k->at && !strcmp(what, k->at) && k->m->inject_layer < 0)
        assert_int_equal(kvd_lab_inject(k->m, 1, 5, &err), 0);
    return ++k->calls == k->cancel_at;
}

static lab make_lab(kvd_model *m, hook *k)
{
    lab l = {.m = m, .model_file = "tiny.gguf", .quick = true, .n_new = 6, .layer = -1, .head = -1, .tick = tick, .tick_ctx = k};
    kvd_session_options_defaults(&l.so);
    kvd_model_get_info(m, &l.info);
    *k = (hook){.m = m};
    return l;
}

static json_t *run(const lab *l, const char *name, kvd_error *err)
{
    const lab_experiment *e = lab_find(name);
    assert_non_null(e);
    return lab_run(e, l, err);
}

static void test_a_fault_is_noticed(void **state)
{
    static const struct {
        const char *experiment, *at, *policies;
    } cases[] = {{"generation", "kv-direct", NULL},
                 {"generation", "from scratch", NULL},
                 {"multiturn", "kv-direct recompute", NULL},
                 {"multiturn", "kv-direct parked", NULL},
                 {"baselines", "kv-direct:32:recompute", "kv-direct:32:recompute,window:32"},
                 {"sweep", "kv-direct:8:recompute", "kv-direct:8:recompute"}};
    (void)state;
#ifndef KVD_TEST_HOOKS
    skip();
#endif
    kvd_model *m = tiny_load("llama", NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int fault = 0; fault < 2; fault++) {
            kvd_error err = {0};
            hook k;
            lab l = make_lab(m, &k);
            l.policies = cases[i].policies;
            k.at = fault ? cases[i].at : NULL;
            json_t *r = run(&l, cases[i].experiment, &err);
            check(r != NULL, "%s: %s", cases[i].experiment, err.message);
            check(!fault || m->inject_layer == 1, "%s: never at \"%s\"", cases[i].experiment, cases[i].at);
            check(json_is_true(json_object_get(r, "check_failed")) == fault, "%s, %s: fault %d", cases[i].experiment, cases[i].at, fault);
            json_decref(r);
            m->inject_layer = -1;
            check_no_context(m);
        }
    tiny_free(&m);
}

static void test_cancelled_anywhere(void **state)
{
    static const char *const names[] = {"generation", "multiturn", "baselines", "sweep"};
    (void)state;
    kvd_model_options o;
    kvd_model_options_defaults(&o);
    o.n_threads = 1;
    o.kv_budget_bytes = 1 << 30;
    kvd_model *m = tiny_load("llama", &o);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        for (int64_t at = 1; at < 20000; at = at * 3 + 1) {
            kvd_error err = {0};
            hook k;
            int64_t now, peak, budget;
            lab l = make_lab(m, &k);
            l.policies = i == 2 ? "kv-direct:32,h2o:16" : i == 3 ? "kv-direct:8,window:8" : NULL;
            k.cancel_at = at;
            json_t *r = run(&l, names[i], &err);
            check(r || err.code == KVD_E_CANCELLED, "%s: %s", names[i], err.message);
            check((r == NULL) == (k.calls >= at), "%s went on after call %lld", names[i], (long long)at);
            check_no_context(m);
            kvd_memory_context(m, &now, &peak, &budget);
            check(budget == 1 << 30, "%s left a budget of %lld", names[i], (long long)budget);
            bool whole = r != NULL;
            json_decref(r);
            if (whole)
                break;
        }
    tiny_free(&m);
}

/* Opening, answer, next question: the tokens of the whole conversation as rendered. */
static void test_conversations(void **state)
{
    static const char *const models[] = {"llama", "gemma3"};
    static const char answer[] = "The cache is not the memory.";
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        kvd_model *m = tiny_load(models[i], NULL);
        hook k;
        lab l = make_lab(m, &k);
        assert_true(lab_has_chat(&l));
        const kvd_chat_turn turns[] = {{"system", lab_talk_system}, {"user", lab_talk[0]}, {"assistant", answer}, {"user", lab_talk[1]}};
        char *text;
        size_t n_text;
        int32_t *part[3], *whole;
        int64_t n_part[3], n, at = 0;
        kvd_error err;
        assert_int_equal(lab_chat_open(&l, lab_talk_system, lab_talk[0], &part[0], &n_part[0], &err), 0);
        assert_int_equal(kvd_tokenize(m, answer, strlen(answer), 0, &part[1], &n_part[1], &err), 0);
        assert_int_equal(lab_chat_next(&l, lab_talk[1], &part[2], &n_part[2], &err), 0);
        assert_int_equal(kvd_chat_render(m, NULL, turns, 4, 0, &text, &n_text, &err), 0);
        assert_int_equal(kvd_tokenize(m, text, n_text, KVD_TOKENIZE_BOS | KVD_TOKENIZE_SPECIAL, &whole, &n, &err), 0);
        for (int p = 0; p < 3; p++)
            for (int64_t t = 0; t < n_part[p]; t++, at++)
                check(at < n && whole[at] == part[p][t], "%s: token %lld", models[i], (long long)at);
        assert_int_equal(at, n);
        for (int p = 0; p < 3; p++)
            kvd_ids_free(part[p]);
        kvd_ids_free(whole);
        kvd_text_free(text);
        tiny_free(&m);
    }
}

/* Prompts are as long as asked, begin with BOS where there is one, and are not all the same. */
static void test_prompts(void **state)
{
    (void)state;
    kvd_model *m = tiny_load("gemma3", NULL);
    hook k;
    lab l = make_lab(m, &k);
    kvd_error err;
    int32_t *ids;
    json_t *r = json_pack("{s:{}, s:[]}", "settings", "notes");
    assert_int_equal(lab_prompts(&l, r, 7, 1500, &ids, &err), 0);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(ids[i * 1500], kvd_token_bos(m));
        check(i == 0 || i >= LAB_PASSAGES || memcmp(ids, ids + i * 1500, 1500 * sizeof *ids), "prompt %d is the first again", i);
        for (int t = 0; t < 1500; t++)
            assert_in_range(ids[i * 1500 + t], 0, l.info.n_vocab - 1);
    }
    free(ids);
    l.text = "one two three four five six seven eight nine ten";
    l.n_text = strlen(l.text);
    assert_int_equal(lab_prompts(&l, r, 2, 6, &ids, &err), 0);
    check(memcmp(ids + 1, ids + 7, 5 * sizeof *ids), "both prompts are from one place");
    free(ids);
    assert_int_equal(lab_prompts(&l, r, 1, 600, &ids, &err), KVD_E_ENCODING);
    json_decref(r);
    tiny_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_fault_is_noticed),
        cmocka_unit_test(test_cancelled_anywhere),
        cmocka_unit_test(test_conversations),
        cmocka_unit_test(test_prompts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
