#include "base/dtype.h"

const kvd_dtype_info kvd__dtypes[KVD_DTYPE_COUNT] = {
#define KVD_X(id, number, elems, bytes, ok) {#id, number, elems, bytes, ok},
    KVD_DTYPES(KVD_X)
#undef KVD_X
};

int kvd__dtype_from_number(uint32_t number)
{
    for (int t = 0; t < KVD_DTYPE_COUNT; t++)
        if (kvd__dtypes[t].number == number)
            return t;
    return -1;
}
