/* Runs a fuzzer's LLVMFuzzerTestOneInput once on each file named, so that what
 * a fuzzer has found can be replayed, and kept as a test, with any compiler.
 * usage: FUZZER FILE... */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int replay(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) {
        fprintf(stderr, "%s: cannot be read\n", path);
        return 1;
    }
    long n = ftell(f);
    rewind(f);
    uint8_t *data = malloc(n > 0 ? (size_t)n : 1); /* exact: a sanitizer sees the end */
    if (n < 0 || !data || fread(data, 1, (size_t)n, f) != (size_t)n) {
        fprintf(stderr, "%s: cannot be read\n", path);
        return 1;
    }
    fclose(f);
    LLVMFuzzerTestOneInput(data, (size_t)n);
    free(data);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;
    for (int i = 1; i < argc; i++)
        failed += replay(argv[i]);
    printf("%d passed, %d failed\n", argc - 1 - failed, failed);
    return failed != 0;
}
