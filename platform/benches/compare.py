#!/usr/bin/env python3
"""Compares leanstream with llama.cpp's llama-bench on one machine, in turns, and prints medians and ratios.

usage: compare.py resident LEANSTREAM LLAMA_BENCH MODEL...
       compare.py streaming LEANSTREAM LLAMA_BENCH MODEL LIMIT_MB[,LIMIT_MB...] [READ_AHEAD_KB[,READ_AHEAD_KB...]]

resident: prompts of 128 and 512 tokens and generation of 64, two threads, everything in memory.
streaming (root): both in a memory cgroup of the limit, page cache dropped before each; llama.cpp memory-mapped without
repacking (with it, it is killed), the disk's read-ahead set as given and put back. With PACK set to a packed model
leanstream runs that instead, with the options in PACK_ARGS.
"""
import glob, json, os, statistics, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROUNDS = int(os.environ.get('ROUNDS', 3))


def lines(command):
    """Objects of the JSON lines that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    objects = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    if done.returncode or not objects:
        print(f'{command[0]}: exit {done.returncode}: {done.stderr.strip()[-300:]}', file=sys.stderr)
    return objects


def test(o):
    return f"pp{o['n_prompt']}" if o['n_prompt'] else f"tg{o['n_gen']}"


def row(what, ours, theirs, extra=''):
    if ours and theirs:
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f'| {what} | {a:.2f} | {b:.2f} | {a / b:.2f} |{extra}', flush=True)


def resident(ours, theirs, *models):
    print('| model, test | leanstream t/s | llama.cpp t/s | ratio |\n|---|---:|---:|---:|')
    for model in models:
        big = os.path.getsize(model) > 1 << 30
        prompts, gen = ('128', '16') if big else ('128,512', '64')
        got = {}
        for _ in range(ROUNDS):
            for o in lines([ours, 'bench', '-m', model, '-t', '2', '-p', prompts, '-n', gen, '-r', '2', '-o', 'jsonl']):
                got.setdefault(test(o), ([], []))[0].append(o['median_ts'])
            for o in lines([theirs, '-m', model, '-t', '2', '-p', prompts, '-n', gen, '-r', '2', '-o', 'jsonl']):
                got.setdefault(test(o), ([], []))[1].append(o['avg_ts'])
        for name, (a, b) in got.items():
            row(f'{os.path.basename(model)}, {name}', a, b)


def streaming(ours, theirs, model, limits, ahead='128,8192'):
    device = os.stat(model).st_dev
    queue = os.path.realpath(f'/sys/dev/block/{os.major(device)}:{os.minor(device)}')
    queue = next(q for q in (queue + '/queue', os.path.dirname(queue) + '/queue') if os.path.isdir(q))
    before = open(f'{queue}/read_ahead_kb').read()
    tokens = os.environ.get('TOKENS', '6')
    mine_model, mine_args = os.environ.get('PACK', model), os.environ.get('PACK_ARGS', '').split()
    print('| cgroup, read-ahead | leanstream t/s | llama.cpp t/s | ratio | leanstream peak MiB, MB/token |\n|---|---:|---:|---:|---|')
    try:
        for limit in limits.split(','):
            for kb in ahead.split(','):
                open(f'{queue}/read_ahead_kb', 'w').write(kb)
                a, b, extra = [], [], ''
                for _ in range(ROUNDS):
                    for mine in (True, False):
                        subprocess.run('sync; echo 3 > /proc/sys/vm/drop_caches', shell=True)
                        group = [f'{HERE}/in_cgroup.sh', limit]
                        if mine:
                            command = [ours, 'bench', '-m', mine_model, '--budget', f'{limit}M', '-t', '2', '-p', '0', '-n', tokens, '-r', '1', '-o', 'jsonl', *mine_args]
                        else:
                            command = [theirs, '-m', model, '-t', '2', '-p', '0', '-n', tokens, '-r', '1', '-o', 'jsonl', '-lm', 'mmap', '--repack', '0', '--no-warmup']
                        for o in lines(group + command):
                            (a if mine else b).append(o['median_ts'] if mine else o['avg_ts'])
                            if mine:
                                extra = f" {o['peak_rss_bytes'] >> 20}, {o['bytes_per_token'] / 1e6:.0f} |"
                row(f'{limit} MiB, {kb} KiB', a, b, extra)
    finally:
        open(f'{queue}/read_ahead_kb', 'w').write(before)


if __name__ == '__main__':
    modes = {'resident': resident, 'streaming': streaming}
    if len(sys.argv) < 5 or sys.argv[1] not in modes:
        sys.exit(__doc__)
    modes[sys.argv[1]](*sys.argv[2:])
