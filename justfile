# Recipes. `just --list` shows them; each line runs without just as well.

cache := env("LEANSTREAM_CACHE", env("HOME") / ".cache/leanstream")
smollm2 := cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
gemma3 := cache / "gemma-3-270m-q4_k_m.gguf"
synth3b := cache / "synth-3b-q4_0.gguf"
relu := cache / "smollm2-135m-relu.lean"
synth7b := cache / "synth-7b-relu.lean"
relu_trace := cache / "relu.trace"
texts := cache / "texts"
bin := "target/release/leanstream"

# everything CI runs
ci:
    bash .ci/run

test:
    cargo test --workspace --release

lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --release -- -D warnings

build:
    cargo build --release

# fully static binaries; rust-lld comes with Rust
static-aarch64:
    rustup target add aarch64-unknown-linux-musl
    cargo build --release --target aarch64-unknown-linux-musl

static-x86_64:
    rustup target add x86_64-unknown-linux-musl
    cargo build --release --target x86_64-unknown-linux-musl

# a model of a 3B shape with random weights, 1.67 GB, for speed
synth-3b: build
    mkdir -p {{cache}}
    cargo run --release --example synth -- --arch llama --type q4_0 --d 3072 --layers 28 --ff 8192 --heads 24 --kv-heads 8 --vocab 49152 --tied --rope-base 500000 --seed 0 --tokenizer-from {{smollm2}} -o {{synth3b}}

# speed with everything resident: decode and prompt
bench-resident: build
    for m in {{smollm2}} {{gemma3}} {{synth3b}}; do {{bin}} bench -m $m -p 128,512 -n 64 -r 5 -t 2; done

# speed when weights stream: 25, 50, 75 and 100% of the 3B model
bench-streaming: build
    {{bin}} bench -m {{synth3b}} --budget 25%,50%,75%,110% -p 0 -n 8 -r 3 -t 2

# the same under a memory cgroup of the budget (root, cgroup v1 or v2)
bench-cgroup limit="800": build
    bash platform/benches/in_cgroup.sh {{limit}} {{bin}} bench -m {{synth3b}} --budget {{limit}}M -p 0 -n 8 -r 3 -t 2

# the pack of a ReLU model, for what follows: just pack-relu PATH/smollm2-135m-relu.gguf
pack-relu model: build
    mkdir -p {{cache}}
    {{bin}} pack {{model}} {{relu}}

# the pack of any model, beside it in the cache
pack model: build
    {{bin}} pack {{model}} {{cache}}/{{file_stem(model)}}.lean

# the pack of a model whose neurons are all used (SiLU, GELU): its head alone
pack-head model: build
    mkdir -p {{cache}}
    {{bin}} pack --ffn matrices {{model}} {{cache}}/{{file_stem(model)}}-head.lean

# retention policies, every active neuron, room for 10, 25 and 50% of the neurons; with a figure
bench-policies figure="target/policies.svg" *args: build
    {{bin}} bench -m {{relu}} --budget ffn:10%,ffn:25%,ffn:50% --policy refine,lru-window,oneshot,static,lfu --mode exact -p 0 -n 128 -r 5 -t 2 --plot {{figure}} {{args}}

# what leaving out neurons that are not in memory brings, and costs in perplexity over TEXT
bench-sparse text *args: build
    for keep in 1 0.5 0.3; do {{bin}} bench -m {{relu}} --budget ffn:10%,ffn:25%,ffn:50% --keep $keep -p 0 -n 128 -r 5 -t 2 --perplexity {{text}} {{args}}; done

# what each part of the sparse scheme does, at the disk's speed and as on a board's eMMC
bench-ablation text *args: build
    for slow in "" "--throttle-read 300M,80us"; do \
        for parts in "--without order,looks,retention" "--without looks,retention" "--without retention" "" "--head fast"; do \
            {{bin}} bench -m {{relu}} --text {{text}} --budget ffn:25% --mode exact -p 0 -n 64 -r 2 -t 2 $parts $slow {{args}}; \
        done; \
    done

# both as on a board's eMMC
bench-policies-throttled: (bench-policies "target/policies-throttled.svg" "--throttle-read" "300M,80us")

bench-sparse-throttled text: (bench-sparse text "--throttle-read" "300M,80us")

# at the size of a 7B model: random weights (4 GB each for the model, which may go, and its pack), and the
# active neurons of a trace of the ReLU model over TEXT; what is not there yet is made
bench-7b text model=synth7b trace=relu_trace *args: build
    test -e {{model}} || cargo run --release --example synth -- --shape 7b-relu -o {{without_extension(model)}}.gguf
    test -e {{model}} || {{bin}} pack --calibrate none {{without_extension(model)}}.gguf {{model}}
    test -e {{trace}} || {{bin}} trace -m {{relu}} -f {{text}} -n 600 -o {{trace}}
    for slow in "" "--throttle-read 300M,80us"; do \
        {{bin}} bench -m {{model}} --trace {{trace}} --budget ffn:20%,ffn:25% --policy refine,lfu,static,oneshot,lru-window --mode exact -n 32 -r 3 -t 2 $slow {{args}}; \
        for keep in 0.7 0.5; do \
            {{bin}} bench -m {{model}} --trace {{trace}} --budget ffn:20%,ffn:25% --policy refine --keep $keep -n 32 -r 3 -t 2 $slow {{args}}; \
        done; \
    done

# beside llama.cpp, in turns on this machine; LLAMA_BENCH is your own build of it
compare-resident llama_bench: build
    platform/benches/compare.py resident {{bin}} {{llama_bench}} {{smollm2}} {{gemma3}} {{synth3b}}

# the same when the model doesn't fit: 25, 50, 75% of it (root, for cgroups and read-ahead)
compare-streaming llama_bench: build
    platform/benches/compare.py streaming {{bin}} {{llama_bench}} {{synth3b}} 400,800,1300

# reading bandwidth by block size and depth
bench-storage file=synth3b:
    cargo run --release --example io_bandwidth -- {{file}}

# rows of the head that --head computes exactly over a text, and whether tokens are the same; packs
# beside the models, as 'leanstream pack' makes them
head-rows text: build
    for m in {{smollm2}} {{gemma3}}; do cargo run --release --example head_rows -- ${m%.gguf}.lean {{text}}; done

# kernels: GB/s and GMAC/s by type and shape
bench-kernels:
    cargo bench -p leanstream --bench kernels

# the texts that tuning is measured with: novels and a translation of the Bible, in the public domain
texts:
    platform/benches/datasets.py texts {{texts}}
    head -c 65000 {{texts}}/austen-test.txt | head -n -1 > {{texts}}/austen-eval.txt

# the model that `leanstream demo` has in it, from nothing: half an hour on two cores (see platform/models/README.md)
demo-model out=(cache / "demo.gguf"): build
    cat {{texts}}/web-train.txt {{texts}}/austen-train.txt > {{texts}}/demo-train.txt
    cargo run --release --example synth -- --arch arcee --type f32 --d 256 --layers 4 --ff 1024 --heads 4 --kv-heads 2 --ctx 1024 --tied --embed-std 0.05 --tokenizer-text {{texts}}/demo-train.txt --vocab 2048 --seed 1 --name 'leanstream demo' -o {{out}}.start
    {{bin}} tune --full -m {{out}}.start --data {{texts}}/demo-train.txt -o {{out}} --type q8_0 --seq 512 --batch 8 --steps 2400 --lr 0.003 --warmup 100 --weight-decay 0.1 --budget 100M --sparsity 0.03 --seed 1 --resume

# what a step of tuning takes and what it holds, by how activations are saved
bench-tune steps="20": build
    for how in "--act-bits f32 --budget 2G" "--act-bits 8 --budget 400M --recompute never" "--act-bits 4 --budget 400M --recompute never" "--act-bits 2 --budget 400M --recompute never" "--recompute layers --budget 300M" "--budget 200M" "--budget 160M" "--budget 104M"; do {{bin}} tune -m {{smollm2}} --data {{texts}}/austen-train.txt -o target/bench-tune.gguf --steps {{steps}} --checkpoint-every 0 --json $how; done

# what few bits cost in loss: 300 steps each, by seed
tune-losses seeds="1 2 3" steps="300": build
    for seed in {{seeds}}; do \
        for how in "--act-bits f32 --budget 2G" "--budget 104M" "--act-bits 8 --budget 400M --recompute never" "--act-bits 4 --budget 400M --recompute never" "--act-bits 2 --budget 400M --recompute never"; do \
            {{bin}} tune -m {{smollm2}} --data {{texts}}/austen-train.txt --eval {{texts}}/austen-eval.txt -o target/tune-losses.gguf --steps {{steps}} -s $seed --checkpoint-every 0 --json $how; \
        done; \
    done

# beside PyTorch with PEFT, in turns; PYTHON has torch, peft, transformers and gguf
compare-tune python="python3": build
    {{bin}} tokenize -m {{smollm2}} -f {{texts}}/austen-eval.txt --ids > target/ids.json
    {{python}} platform/benches/tune_peers.py {{smollm2}} --tokens target/ids.json --steps 6 --threads 2 --variants peft,peft-checkpoint,peft-checkpoint+chunked

# what leaving out missing neurons costs, by what is known of them; MODEL is a ReLU model as GGUF, PYTHON has numpy and gguf
leaving-out model gpl python="python3": build
    head -c 100000 {{texts}}/web-train.txt > target/calibration.txt
    head -c 40000 {{texts}}/web-test.txt > target/web.txt
    head -c 40000 {{gpl}} > target/gpl.txt
    for text in calibration gpl web; do {{bin}} tokenize -m {{model}} -f target/$text.txt --ids > target/$text.ids; done
    {{python}} platform/benches/leaving_out.py {{model}} target/calibration.ids target/gpl.ids target/web.ids

# a task with a score: sensor lines to JSON
sensor-task: build
    cargo run --release --example sensor_task -- --items 2000 --tests 200 -o target/train.jsonl --held-out target/test.jsonl
    {{bin}} tune -m {{smollm2}} --data target/train.jsonl --budget 300M --steps 240 --batch 7 --lr 0.001 --warmup 10 -o target/sensor.gguf

# packing and unpacking of activations, GB/s of f32, beside naive dynamic quantization
bench-activations *filter:
    cargo bench -p leanstream --bench activations -- {{filter}}

# a convolutional classifier with its activations in few bits
tune-images *args:
    cargo run --release --example tune_images -- {{args}}

# ten minutes on each fuzz target
fuzz:
    FUZZ_SECONDS=600 bash .ci/run
