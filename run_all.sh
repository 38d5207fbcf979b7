#!/usr/bin/env bash
# The benchmark as a list of commands. What is done already is skipped, so it can be stopped and started again.
#
#   bash run_all.sh                  the quick benchmark on scikit-learn's digits, then its evaluation
#   bash run_all.sh digits_ddim      all twelve methods on the digits
#   bash run_all.sh digits_gan       the eleven methods that StyleGAN2 knows on the digits
#   bash run_all.sh concepts_demo    nine methods that learn five concepts, on a small text-to-image model that is
#                                    trained first, once
#   bash run_all.sh strengths        two tasks of digits, each penalty over the eight strengths of its `search`
#   bash run_all.sh gtep_demo        the two-phase protocol in small: digits 0-4 against 5-9, four methods
#   bash run_all.sh paper            the whole benchmark: StyleGAN2 and DDIM on seven data sets, DreamBooth and Custom
#                                    Diffusion on five concepts, five orders (GPU-months)
#   bash run_all.sh --list quick     print the training commands of a profile, one a line, and run nothing
#   ORDERS="1 2 3 4 5" bash run_all.sh quick     other class orders; the seed is the number of the order
#
# JOBS training commands run at once (default: one a core, four at most), THREADS threads each (default: 1).
# The number of threads changes the last bits of the weights, the number of jobs changes nothing.
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python}
ORDERS=${ORDERS:-1}

quick() {  # the longest first
    for order in $ORDERS; do
        for method in noncl er ensemble ncl; do
            echo "$PYTHON train_ddim.py --dataset digits --method $method --order $order --seed $order"
        done
    done
}

digits_ddim() {
    for order in $ORDERS; do
        for method in gr noncl er agem kd ewc mas si l2 ensemble clora ncl; do
            echo "$PYTHON train_ddim.py --dataset digits --method $method --order $order --seed $order"
        done
    done
}

digits_gan() {
    for order in $ORDERS; do
        for method in noncl gr agem er kd si ewc mas l2 ensemble ncl; do
            echo "$PYTHON train_stylegan2.py --dataset digits --method $method --order $order --seed $order"
        done
    done
}

concept_methods() {  # $1: the flags; the longest first
    for base in dreambooth custom_diffusion; do
        for method in noncl si ewc mas kd l2 ensemble ncl; do
            echo "$PYTHON train_concepts.py --base $base --method $method $1"
        done
    done
    echo "$PYTHON train_concepts.py --base dreambooth --method clora $1"
}

concepts_demo() {
    for order in $ORDERS; do
        concept_methods "--order $order --seed $order"
    done
}

strengths() {
    train="$PYTHON train_ddim.py --dataset digits:0-3 --tasks 2 --out runs/strengths"
    echo "$train --method ncl"
    $PYTHON -c "
from runfolder import method_class
for method in ('kd', 'l2', 'ewc', 'si', 'mas'):
    for value in method_class(method).search[f'{method}_weight']:
        print(f'$train --method {method} --{method}_weight {value}')"
}

gtep_demo() {  # $1: --list, or nothing. As small as still shows all parts of the report: its numbers prove nothing
    echo "$PYTHON gtep.py $1 --methods l2 si kd er --tune digits:0-4 --eval digits:5-9 --both --trials 3 --orders 1" \
        "--jobs $JOBS --num_samples 64 --out results/gtep_demo" \
        "-- --steps 40 --batch_size 16 --replay_size 8 --ddim_steps 10"
}

paper() {  # order 1 of the small data sets comes first; ImageNet has one order, and no GAN, as in the paper
    for order in 1 2 3 4 5; do
        for dataset in mnist fashion cifar10 flowers cub cars; do
            for method in ncl er noncl ensemble l2 ewc si mas kd agem gr; do
                echo "$PYTHON train_stylegan2.py --dataset $dataset --method $method --order $order --seed $order"
            done
            for method in ncl er noncl ensemble clora l2 ewc si mas kd agem gr; do
                echo "$PYTHON train_ddim.py --dataset $dataset --method $method --order $order --seed $order"
            done
        done
    done
    for order in 1 2 3 4 5; do
        concept_methods "--model CompVis/stable-diffusion-v1-4 --dataset objects --order $order --seed $order"
    done
    for method in ncl er ensemble clora l2 ewc si mas kd agem gr noncl; do
        echo "$PYTHON train_ddim.py --dataset imagenet64 --method $method --order 1 --seed 1"
    done
}

list=""
if [ "${1:-}" = --list ]; then list=yes; shift; fi
profile=${1:-quick}
case $profile in
    gtep_demo) ;;
    quick | digits_ddim) runs=runs/digits/ddim results=results ;;
    digits_gan) runs=runs/digits/stylegan2 results=results ;;
    concepts_demo) runs=runs/toys results=results/concepts ;;
    paper) runs=runs results="results --paper" JOBS=${JOBS:-1} ;;  # one GPU: one run at a time
    strengths) runs=runs/strengths results=results/strengths ;;
    *) echo "error: unknown profile '$profile': choose quick, digits_ddim, digits_gan, concepts_demo, strengths, gtep_demo or paper" >&2; exit 2 ;;
esac
cores=$(getconf _NPROCESSORS_ONLN)
JOBS=${JOBS:-$((cores < 4 ? cores : 4))}
if [ -n "$list" ]; then
    if [ "$profile" = gtep_demo ]; then $(gtep_demo --list); else "$profile"; fi
    exit
fi

export OMP_NUM_THREADS=${THREADS:-1}
[ "$profile" != concepts_demo ] || $PYTHON tiny_world.py  # before the runs, which would wait for each other
if [ "$profile" = gtep_demo ]; then $(gtep_demo ""); exit; fi
# Side by side, progress bars would write over each other: through a pipe the scripts print a line a task instead.
if [ "$JOBS" -gt 1 ]; then
    echo "$("$profile" | wc -l) runs, $JOBS at a time; a line for each task learnt"
    "$profile" | xargs -P "$JOBS" -I{} bash -c '{} 2>&1 | cat; exit "${PIPESTATUS[0]}"'
else
    while read -r command; do $command </dev/null; done < <("$profile")
fi
unset OMP_NUM_THREADS  # scoring is one process and may use all cores: threads change its samples in the last bits only
$PYTHON eval_metrics.py "$runs" --out $results
[ "$profile" != strengths ] || $PYTHON docs/strengths.py "$runs" --out "$results/strengths.png"
