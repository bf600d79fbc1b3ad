/* Chat templates: which text is recognised as which, and what each renders.
 * tests/system/test_chat_jinja.py compares with Jinja2 on the authors' templates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "token/chat.h"

static kvd_ledger ledger;

static const kvd_chat_message sys_talk[] = {
    {"system", " Be brief. "}, {"user", "Hi\n"}, {"assistant", " Hello "}, {"user", "Bye"}};
static const kvd_chat_message talk[] = {{"user", "Hi\n"}, {"assistant", " Hello "}, {"user", "Bye"}};

static void expect(kvd_chat c, const kvd_chat_message *m, int64_t n, bool generate, bool thinking, const char *expected)
{
    char *out;
    size_t n_out;
    kvd_error err;
    int rc = kvd__chat_render(c, m, n, generate, thinking, &ledger, &out, &n_out, &err);
    if (rc)
        fail_msg("%s: %s", kvd__chat_name(c), err.message);
    assert_string_equal(out, expected);
    assert_int_equal(n_out, strlen(expected));
    kvd__free(out);
    assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
}

#define N(a) ((int64_t)(sizeof(a) / sizeof((a)[0])))

static void test_names(void **state)
{
    for (int c = 0; c < (int)KVD_CHAT_COUNT; c++)
        assert_int_equal(kvd__chat_find(kvd__chat_name((kvd_chat)c)), c);
    assert_int_equal(kvd__chat_find("vicuna"), KVD_CHAT_NONE);
    assert_string_equal(kvd__chat_name(KVD_CHAT_NONE), "none");
}

static void test_chatml_family(void **state)
{
    expect(KVD_CHAT_CHATML, talk, 1, false, true, "<|im_start|>user\nHi\n<|im_end|>\n");
    expect(KVD_CHAT_CHATML, sys_talk, N(sys_talk), true, true,
           "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
           "<|im_start|>assistant\n Hello <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n");
    expect(KVD_CHAT_SMOLLM2, talk, 1, true, true,
           "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
           "<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n");
    expect(KVD_CHAT_SMOLLM2, sys_talk, 1, false, true, "<|im_start|>system\n Be brief. <|im_end|>\n");
    expect(KVD_CHAT_QWEN25, talk, 1, true, true,
           "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
           "<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n");
    expect(KVD_CHAT_QWEN25, sys_talk, 2, false, true,
           "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n");
}

static void test_qwen3(void **state)
{
    expect(KVD_CHAT_QWEN3, talk, 1, true, true, "<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n");
    expect(KVD_CHAT_QWEN3, talk, 1, true, false,
           "<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    const kvd_chat_message thoughts[] = {{"user", "1+1"},
                                         {"assistant", "<think>\nhm\n</think>\n\n2"},
                                         {"user", "sure?"},
                                         {"assistant", "<think>\nyes\n</think>\n\nYes."}};
    expect(KVD_CHAT_QWEN3, thoughts, N(thoughts), false, true,
           "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
           "<|im_start|>assistant\n<think>\nyes\n</think>\n\nYes.<|im_end|>\n");
}

static void test_deepseek_r1(void **state)
{
    expect(KVD_CHAT_DEEPSEEK_R1, sys_talk, N(sys_talk), true, true,
           " Be brief. <｜User｜>Hi\n<｜Assistant｜> Hello <｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜><think>\n");
    const kvd_chat_message thoughts[] = {{"user", "1+1"}, {"assistant", "<think>hm</think>\n2"}};
    expect(KVD_CHAT_DEEPSEEK_R1, thoughts, N(thoughts), false, true,
           "<｜User｜>1+1<｜Assistant｜>\n2<｜end▁of▁sentence｜>");
    expect(KVD_CHAT_DEEPSEEK_R1, talk, 1, true, false, "<｜User｜>Hi\n<｜Assistant｜><think>\n</think>");
}

static void test_llama(void **state)
{
    expect(KVD_CHAT_LLAMA2, talk, N(talk), true, true, "[INST] Hi [/INST] Hello </s><s>[INST] Bye [/INST]");
    expect(KVD_CHAT_LLAMA2, sys_talk, 2, true, true, "[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\nHi [/INST]");
    const kvd_chat_message blank[] = {{"system", "S"}, {"user", " \n"}}, left[] = {{"system", "S"}, {"user", " x "}};
    expect(KVD_CHAT_LLAMA2, blank, 2, true, true, "[INST] <<SYS>>\nS\n<</SYS>> [/INST]");
    expect(KVD_CHAT_LLAMA2, left, 2, true, true, "[INST] <<SYS>>\nS\n<</SYS>>\n\n x [/INST]");
    expect(KVD_CHAT_LLAMA3, sys_talk, 2, true, true,
           "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
           "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    expect(KVD_CHAT_LLAMA31, talk, 1, false, true,
           "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
           "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>");
    expect(KVD_CHAT_LLAMA31, sys_talk, 1, false, true,
           "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
           "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>");
}

static void test_gemma_and_mistral(void **state)
{
    expect(KVD_CHAT_GEMMA, sys_talk, N(sys_talk), true, true,
           "<start_of_turn>user\n Be brief. \n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
           "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n");
    const kvd_chat_message wide[] = {{"user", "\xe3\x80\x80\xc2\xa0 x\xe2\x80\x83\x1f"}};
    expect(KVD_CHAT_GEMMA, wide, 1, false, true, "<start_of_turn>user\nx<end_of_turn>\n");
    expect(KVD_CHAT_MISTRAL, talk, N(talk), true, true, "[INST]Hi\n[/INST] Hello </s>[INST]Bye[/INST]");
    expect(KVD_CHAT_MISTRAL, sys_talk, N(sys_talk), true, true,
           "[INST]Hi\n[/INST] Hello </s>[INST] Be brief. \n\nBye[/INST]");
    expect(KVD_CHAT_MISTRAL_V1, talk, N(talk), true, true, "[INST] Hi\n [/INST] Hello </s>[INST] Bye [/INST]");
    expect(KVD_CHAT_MISTRAL_V2, sys_talk, N(sys_talk), true, true,
           " [INST]  Be brief. \n\nHi\n [/INST]  Hello </s> [INST] Bye [/INST]");
    expect(KVD_CHAT_MISTRAL_V3, sys_talk, N(sys_talk), true, true,
           "[INST] Hi\n[/INST] Hello</s>[INST]  Be brief. \n\nBye[/INST]");
}

static void test_refusals(void **state)
{
    static const kvd_chat turns[] = {KVD_CHAT_LLAMA2, KVD_CHAT_GEMMA, KVD_CHAT_MISTRAL};
    const kvd_chat_message answer_first[] = {{"assistant", "a"}}, twice[] = {{"user", "a"}, {"user", "b"}},
                           late_system[] = {{"user", "a"}, {"system", "b"}}, tool[] = {{"tool", "a"}}, null[] = {{"user", NULL}};
    char *out = NULL;
    size_t n;
    kvd_error err;
    for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
        assert_int_equal(kvd__chat_render(turns[i], answer_first, 1, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
        assert_int_equal(kvd__chat_render(turns[i], twice, 2, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
        assert_int_equal(kvd__chat_render(turns[i], late_system, 2, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    }
    assert_int_equal(kvd__chat_render(KVD_CHAT_MISTRAL_V1, sys_talk, 2, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    assert_int_equal(kvd__chat_render(KVD_CHAT_CHATML, tool, 1, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    assert_int_equal(kvd__chat_render(KVD_CHAT_CHATML, null, 1, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    assert_int_equal(kvd__chat_render(KVD_CHAT_CHATML, tool, 0, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    assert_int_equal(kvd__chat_render(KVD_CHAT_NONE, talk, 1, true, true, &ledger, &out, &n, &err), KVD_E_ARG);
    assert_null(out);
    for (int64_t i = 1; i < 4; i++) {
        kvd__ledger_init(&ledger, 0);
        ledger.fail_at = i;
        int rc = kvd__chat_render(KVD_CHAT_LLAMA31, sys_talk, 4, true, true, &ledger, &out, &n, &err);
        assert_true(rc == KVD_E_NOMEM || rc == 0);
        if (!rc)
            kvd__free(out);
        assert_int_equal(ledger.now[KVD_ACC_HOST], 0);
    }
    kvd__ledger_init(&ledger, 0);
}

static void test_detection(void **state)
{
    static const struct {
        const char *text;
        kvd_chat c;
    } cases[] = {
        {"{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'}}", KVD_CHAT_CHATML},
        {"{{'<|im_start|>system\\n' + x + '<|im_end|>'}}", KVD_CHAT_CHATML},
        {"{{'<|im_start|>system\nBe good.<|im_end|>'}}", KVD_CHAT_NONE}, /* a default of its own */
        {"{{'<|im_start|>system\\nBe good.<|im_end|>'}}", KVD_CHAT_NONE},
        {"<|im_start|><|im_sep|><|im_end|>", KVD_CHAT_NONE},
        {"<|im_start|>assistant\\n<think>\\n<|im_end|>", KVD_CHAT_NONE}, /* always thinks */
        {"<|im_start|><|im_end|>{% if tools %}", KVD_CHAT_NONE},
        {"<|im_start|>", KVD_CHAT_NONE},
        {"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>'",
         KVD_CHAT_LLAMA3},
        {"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' tools",
         KVD_CHAT_NONE},
        {"'<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' .. 'model'", KVD_CHAT_GEMMA},
        {"\"<start_of_turn>\" + role + \"\\n\" .. | trim .. '<end_of_turn>\\n' .. \"model\"", KVD_CHAT_GEMMA},
        {"[INST] <<SYS>>", KVD_CHAT_NONE},
        {"{{ bos_token }}{{ '[INST] ' + message['content'] + ' [/INST]' }}{{ message['content'] + eos_token}} raise_exception(",
         KVD_CHAT_MISTRAL_V1},
        {"{{ bos_token }}{{ '[INST] ' + message['content'] + ' [/INST]' }}{{ message['content'] + eos_token + ' '}} raise_exception(",
         KVD_CHAT_NONE},
        {"\\", KVD_CHAT_NONE},
        {"### Instruction:", KVD_CHAT_NONE},
        {"", KVD_CHAT_NONE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (kvd__chat_detect(cases[i].text, strlen(cases[i].text)) != cases[i].c)
            fail_msg("%s is %s", cases[i].text, kvd__chat_name(kvd__chat_detect(cases[i].text, strlen(cases[i].text))));
}

int main(void)
{
    kvd__ledger_init(&ledger, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),      cmocka_unit_test(test_chatml_family), cmocka_unit_test(test_qwen3),
        cmocka_unit_test(test_deepseek_r1), cmocka_unit_test(test_llama),        cmocka_unit_test(test_gemma_and_mistral),
        cmocka_unit_test(test_refusals),   cmocka_unit_test(test_detection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
