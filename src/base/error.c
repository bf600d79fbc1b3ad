#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct {
    int code, exit_code;
    const char *name, *text;
} entry;

static const entry entries[] = {
#define KVD_X(name, value, exit_code, text) {value, exit_code, "KVD_E_" #name, text},
    KVD_ERRORS(KVD_X)
#undef KVD_X
};

static const entry *find(int code)
{
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        if (entries[i].code == code)
            return &entries[i];
    return 0;
}

const char *kvd_error_name(int code)
{
    const entry *e = find(code);
    return e ? e->name : "KVD_E_?";
}

const char *kvd_error_text(int code)
{
    const entry *e = find(code);
    return e ? e->text : "unknown error";
}

int kvd_error_exit(int code)
{
    const entry *e = find(code);
    return e ? e->exit_code : 1;
}

static int vfail(kvd_error *err, int code, int64_t offset, const char *format, va_list ap)
{
    if (!err)
        return code;
    *err = (kvd_error){.code = code, .offset = offset};
    vsnprintf(err->message, sizeof err->message, format, ap);
    for (char *p = err->message; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return code;
}

int kvd__fail(kvd_error *err, int code, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vfail(err, code, -1, format, ap);
    va_end(ap);
    return code;
}

int kvd__fail_at(kvd_error *err, int code, int64_t offset, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    vfail(err, code, offset, format, ap);
    va_end(ap);
    return code;
}
