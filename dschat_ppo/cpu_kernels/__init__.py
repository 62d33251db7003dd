"""Operations on bfloat16 tensors on a CPU, written in C++."""
