#!/bin/bash
# Temporary: the first GPU run of precision.accumulation. bash scripts/bench/sums_first.sh, from the root; 8 minutes.
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
say() { echo; echo "== $* ($SECONDS s)"; }
say which variant is right
for how in 2 4 1; do  # quarters from registers, halves from registers, halves from shared memory
    sed -i "s/^PROMOTED = .*/PROMOTED = $how/" src/precision/kernels/hopper_gemm.py
    echo "variant $how"
    timeout 60 python3 scripts/bench/sums.py --check && right="$right $how"
done
echo "right:$right"
set -- $right
sed -i "s/^PROMOTED = .*/PROMOTED = ${1:-1}/" src/precision/kernels/hopper_gemm.py
say errors, times of variants
timeout 200 python3 scripts/bench/sums.py --times --how $right
say experts
timeout 110 python3 scripts/bench/experts.py --variants limit bf16 fp8_delayed fp8_jit fp8_block --accumulation fp32 fast --rounds 2 --repeat 5
say step
timeout 200 python3 scripts/bench/step.py fp8_delayed --against fp8_delayed --accumulation fp32 fast --apart --steps 10 \
    model=moonlight_16b model.num_layers=5 model.vocab_size=32768 \
    trainer.sequence_length=4096 trainer.global_batch_size=8 trainer.microbatch_size=8
say linears
timeout 60 python3 scripts/bench/linear.py --model moonlight_16b --variants fp8_delayed --accumulation fp32 fast --rounds 2 --repeat 5 --hold 0.3
say end
