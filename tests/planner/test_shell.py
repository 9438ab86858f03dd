# ruff: noqa: E501 - lines of scripts
"""Scripts of bash: bash itself, with programs that print their words, says what they run."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.planner.shell import Launch, find_launches, read_commands
from meshwright.simulator import PlanError

PROGRAMS = ("torchrun", "python", "python3", "srun", "deepspeed", "accelerate", "mpirun")
TOOLS = ("dirname", "basename", "cat", "seq", "mkdir", "realpath", "tee", "env", "nohup", "rm")
# Prints its words; srun goes on with the shell that it starts.
STUB = """#!{python} -IS
import json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
starts = [at for at, word in enumerate(words) if word in ("bash", "sh")]
if words[0] == "srun" and starts:
    os.execv({bash!r}, words[starts[0]:])
with open({log!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
"""
SCRIPTS = {
    "arrays and defaults": r"""
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NNODES-2}; : ${PORT:=29500}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE
    --nnodes "$NUM_NODES"   # a comment
    --master_port ${PORT})
ARGS=(--num-layers 96 --name "two words" --empty "" 'it''s $X')
ARGS+=(--extra 1) ; ARGS[0]=--layers ; ARGS[${#ARGS[@]}]=end ; ARGS+=("--last") ; I=3
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${ARGS[@]}" ${#ARGS[@]} "${ARGS[-1]}" ${ARGS[*]} > log 2>&1
torchrun "x${ARGS[@]}y" "${ARGS[*]}" ${ARGS[I-2]} "${ARGS[$I]}" $ARGS
""",
    "strings that are split": r"""
OPTS=" \
    --a 1 \
    --b 'two words' "
OPTS="$OPTS --c	3
 --d"
EMPTY=
torchrun $OPTS x"$EMPTY" $EMPTY "$EMPTY" pre$OPTS-post
run_cmd="torchrun $OPTS train.py
 ${EMPTY} ${OPTS}"
echo $run_cmd
eval $run_cmd
eval "A=5; torchrun --a=\$A"
""",
    "branches": r"""
MODEL=8B; TP=2; SP=true
if [ $MODEL = 8B ]; then L=32; elif [ $MODEL = 70B ]; then L=80; else L=0; fi
if [[ $SP == t*e && "$TP" -gt 1 ]] || false; then SPO="--sequence-parallel"; fi
[ -z "$NOTHING" ] && X=1 || X=2
[ ! -z "$MODEL" -a $TP -eq 2 ] && Y=yes
test -n "$MODEL" || Y=no
if ! [[ $MODEL != 8B || ( -z $L && $L -lt 4 ) ]]; then Z=z; fi
case $MODEL in 7B|13B) K=1 ;; [0-9]B) K=2 ;; *) K=3 ;; esac
case "$MODEL-$TP" in "8B-"[!3]) J=1;; esac
torchrun --l $L $SPO $X $Y $Z $K $J $([ $TP -ge 3 ] && echo big || echo small)
""",
    "arithmetic": r"""
A=7; B=$((A * 3 - 2 ** 3 % 5)); ((B += 2)); let C=B/2 D=A%4; ((A++)); E=$(( (A > 4) ? 1 : 0 ))
F=$(( $A*$B )); G=$(($F / -3)); H=$((0x1f + 010)); I=$(( A == 8 && B != 0 || 1/1 ))
S=(1 2 9); T=$((${S[2]} + ${S[0]} << 3)); ((U = A > 3)); V=$[~A]; W='A + 1'
torchrun $A $B $C $D $E $F $G $H $I $T "${S[@]}" $U $V $((A++ + --B)) $A $B $((W * 2)) $((0 && (A = 1))) $A
if (( A > 3 && B )); then torchrun yes; fi
""",
    "expansions": r"""
P=/data/models/llama-3.tar.gz; N=llama3-8b; S='a*c'; B='[x]'
torchrun ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P#*[m-z]} ${P%%/[!d]*} ${P%"$B"} ${S#a*} ${S%"*c"} ${N##l?a} ${#N}
torchrun ${N^^} ${N^} ${N,,} ${N:+set} ${M:+set} ${M+set} "${N+a b}" ${M:-"x  y" z} "${M:-x  y}" ${Q:=7} $Q
torchrun "q\"uo\$te" 'a'"b"c\ d ~x 'a{b,c}' "{1..2}" {} 2>/dev/null
""",
    "functions": r"""
scale=3
launch() {
    local n=$1 scale=$((scale + 2)) m=$n; local n=$n$m; n=$1; shift
    if [ $# -eq 0 ]; then return 1; fi
    torchrun --n $n --scale $scale "$@" $# $*
    last=$n
}
function name { echo "run-$1-${2:-none}"; }
launch 4 "a b" c
launch 5 || torchrun failed $last
launch 6 "$(name x)" `name y z` $scale
""",
    "loops": r"""
LIST=; for x in a "b c" 1 2; do LIST="$LIST$x,"; done
n=0; for ((i = 0; i < 5; i++)); do if [ $i -eq 1 ]; then continue; fi; if [ $i = 4 ]; then break; fi; n=$((n + i)); done
k=0; while [ $k -lt 3 ]; do k=$((k + 1)); done
until (( k == 0 )); do ((k--)); done
for tp in 1 2; do for pp in 1 2; do [ $pp = 2 ] && continue 2; torchrun --tp $tp --pp $pp; done; done
for n in $(seq 1 3); do S+=($n); done
torchrun "$LIST" $n $k ${S[@]}
""",
    "here-documents": r"""
A=5
cat > config.json <<EOF
{"torchrun": $A}
torchrun never
EOF
cat <<-'EOT' > other
	torchrun never
	EOT
T=$(cat <<EOF
 x $A $(echo \$B) \$C "q"
y
EOF
)
read -r -d '' R <<EOF
torchrun read $A
  \$B
EOF
bash -c "B=3; $(echo $R)"
torchrun "$T" $T
bash <<EOF
B=6
torchrun --a $A --b \$B
EOF
bash -s one <<'EOF'
torchrun $1 $#
EOF
read -r X Y <<< " 1 2  3 "; IFS=, read -ra Z <<< "a,b c,d"; IFS== read K V <<< "k=v=w"; torchrun $X "$Y" "${Z[1]}" ${#Z[@]} $K $V
""",
    "shells within": r"""
export N=4; M=5
srun -N 2 --ntasks-per-node=8 bash -c "torchrun --nnodes $N --rank \$N $M"
bash -c 'torchrun $N "${M-none}" $0 $1' zero one
sh -c "python -u train.py --n=$N" | tee log
A=1 env B=2 torchrun x
(M=6; torchrun $M); torchrun $M
{ M=7; torchrun $M; } > log; torchrun $M
M=8 torchrun $M; torchrun $M
nohup python3 -m torch.distributed.run --nproc_per_node=8 a.py > x 2>&1
exec torchrun last
torchrun never
""",
    "places": r"""
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)
NAME=$(basename $0 .sh)
D=d; E=e; P=$D/$E/x_${D}_y; Q=z${D}/$E/$D; export R=$D/$E/c S=1; L=($D/$E/c "$D/$E/c" x$D$E.$D)
torchrun $P $Q $R $S ${L[@]} $D/$E/c "$D/$E/$D" --x=$D/$E --y=$D:$E:$D.$E, $D-$E-$D/c
[ "$D/$E/c" = d/e/c ] && [[ $D/$E/c == $D/$E/$D || $D/$E == d/e ]] && torchrun $((D=3))
mkdir -p $HERE/a/b; cd a/b; UP=$(pwd); cd ../..; BACK=$PWD
torchrun $HERE/train.py $NAME $UP $BACK $(basename "$UP") $(dirname $(dirname $UP)) $(realpath a/../x)
""",
    "declarations": r"""
declare -a L=(1 2); declare -x J=3; readonly K=4; typeset T=5
export A=1 B="two words" C; export "D=$A$K"; unset A
torchrun ${L[@]} $J $K $T $B "${A-none}" ${D} ${A:-$B}; set -euo pipefail
f() { torchrun "$@" $# $1; shift; torchrun "$*"; }; f x "y z"
""",
    "line continuations": "A=1 \\\n  B=2 \\\n  torchrun --x=a\\\n1 \\\n    --y \"a\\\nb\" 'c\\\nd' \\\n    # end\n"
    "X=1 Y=2\ntorchrun $X $Y\r\n".replace("\r", ""),
    "status": r"""
false || torchrun a; true && torchrun b; ! false && torchrun c; false && torchrun d; mkdir -p x && torchrun e
cd x || exit 1
if torchrun f; then torchrun g; fi
trap "echo x" EXIT; wait
[ 1 = 2 ] || [ a ] && torchrun h; [[ -n "" ]] ; torchrun $([ 2 -lt 10 ] && echo i)
[ "a" = "b" -o 1 -lt 2 ] && [ ! "" ] && [ "(" = "(" ] && torchrun j
if false; then exit; fi; torchrun k; exit 0; torchrun l
""",
    "redirections": "torchrun a >log b 2>&1 c </dev/null d\n2>err torchrun e\ntorchrun f &>> all &\nwait\n",
    "printing": r"""
A=$(seq 2 4); B="$(echo -n "x  y")"; C=$(echo "a"; echo 'b')
torchrun $A "$B" $B "$C" "$(echo "nested "quotes"")" $(echo '$X') "a$(echo)b" $((1+$(echo 2)))
""",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    bash = shutil.which("bash")
    assert bash is not None
    for name in PROGRAMS:
        stub = folder / name
        stub.write_text(
            STUB.format(python=sys.executable, bash=bash, log=str(folder / "log")), "utf-8"
        )
        stub.chmod(0o755)
    for name in (*TOOLS, "bash", "sh"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def run_with_bash(
    script: str, programs: Path, folder: Path, environment: dict[str, str]
) -> list[list[str]]:
    """Return the words of the programs that bash starts."""
    file, log = folder / "script.sh", programs / "log"
    file.write_text(script, "utf-8")
    log.unlink(missing_ok=True)
    subprocess.run(
        [programs / "bash", str(file)],
        env={**environment, "PATH": str(programs)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return (
        [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    )


def words_of(script: str, file: Path, **defines: str) -> list[list[str]]:
    """Return the words of those programs that our reader finds."""
    found = [
        each
        for each in read_commands(script, file=file, defines=defines)
        if each.words[0].text not in {"echo", "rm"}
    ]
    words = [[word.text for word in each.words] for each in found]
    starts = [next((at for at, w in enumerate(each) if w in PROGRAMS), None) for each in words]
    return [each[at:] for each, at in zip(words, starts, strict=True) if at is not None]


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, programs: Path, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    ours = words_of(script, tmp_path / "script.sh")
    assert len(ours) > 0
    assert ours == run_with_bash(script, programs, tmp_path, {})


def launch_of(script: str, program: str | None = None, **defines: str) -> Launch:
    """Return the one launch of a script."""
    (launch,) = find_launches(read_commands(script, file=None, defines=defines), program=program)
    return launch


def test_environment_and_arguments_come_from_defines(programs: Path, tmp_path: Path) -> None:
    script = 'torchrun --tp ${TP:-2} $GPUS "${1-none}" $# "$@"\n[ $TP -gt 2 ] && torchrun big\n'
    defines = {"TP": "4", "GPUS": "8 9"}
    assert words_of(script, tmp_path / "script.sh", **defines) == run_with_bash(
        script, programs, tmp_path, defines
    )
    assert words_of("torchrun $1 $# ${3:-c} $@", tmp_path / "x", **{"1": "a", "2": "b b"}) == [
        ["torchrun", "a", "2", "c", "a", "b", "b"]
    ]


def test_a_sourced_file_beside_the_script_is_read_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "outside.sh").write_text("TP=1\n", "utf-8")
    (tmp_path / "beside" / "config.sh").write_text("# one\nTP=8\nARGS=(--a\n --b)\n", "utf-8")
    script = 'source "$(dirname "$0")/config.sh"; . ../outside.sh\ntorchrun x.py $TP ${ARGS[@]}\n'
    (command,) = read_commands(script, file=tmp_path / "beside" / "run.sh", defines={})
    assert [word.text for word in command.words] == ["torchrun", "x.py", "8", "--a", "--b"]
    assert [(word.file, word.line) for word in command.words[2:]] == [
        ("config.sh", 2), ("config.sh", 3), ("config.sh", 4),
    ]  # fmt: skip
    missing = read_commands("source gone.sh\ntorchrun ${TP:-8}", file=tmp_path / "r", defines={})
    assert "may be set in gone.sh" in missing[0].words[1].unknown


UNKNOWN = {
    "T=$GPUS_PER_NODE\ntorchrun a $T": "$GPUS_PER_NODE at line 1 is not set in the file; give it with --define GPUS_PER_NODE=8",
    'torchrun a "${ARGS[@]}"': '$ARGS at line 1 is not set in the file; give it with --define ARGS=""',
    "\ntorchrun a $EXTRA_ARGS": '$EXTRA_ARGS at line 2 is not set in the file; give it with --define EXTRA_ARGS=""',
    "torchrun a --tp=$1": "$1 at line 1 is not set in the file; give it with --define 1=VALUE",
    "N=$(nproc)\ntorchrun a $((N * 2))": "$N at line 1: $(nproc) at line 1 is not executed here; give it with --define N=VALUE",
    "if [ $MODE = big ]; then TP=8; else TP=4; fi\ntorchrun a $TP": "$TP depends on a test: $MODE at line 1 is not set in the file; give it with --define MODE=VALUE",
    "A=(x); [ -f conf ] && A+=(--fp8)\ntorchrun a ${A[1]}": "$A depends on a test: the test `-f conf` at line 1 asks for what is not in the file; give it with --define A=VALUE",
    "for i in $LIST; do TP=$i; done; torchrun a $TP": "$TP depends on a test: $LIST at line 1 is not set in the file; give it with --define LIST=VALUE",
    "A=$(printf '%s ' 1 2); torchrun a $A": "$A at line 1: $(printf '%s ' 1 2) at line 1 is not executed here; give it with --define A=VALUE",
    "while read -r TP; do :; done < f; torchrun a $TP": "$TP at line 1 is read from outside the file; give it with --define TP=VALUE",
}


NOT_READ = [
    "${N:0:5}", "${A[@]:1}", "${!N}", "${!A[@]}", "${N@Q}", "${N//a/b}", "x{1..3}", "{a,b}c",     "$'a'", "$(printf %s-%02d run 7)", "<(ls)", "$(cat x)", '"${A[@]:0:2}"', "$(ls | wc -l)",
]  # fmt: skip
REFUSED_CONSTRUCTS = {
    "declare -A S=([a]=1)": "`declare -A` of S is not read",
    "A[1]=2": r"the assignment to the element A\[1\] is not read",
    "A=(1); A[0]+=2": r"the assignment to the element A\[0\] is not read",
    "A=([2]=x)": "an array with keys is not read",
    "select X in a b; do echo $X; done": "`select` is not read",
    "set -- a b": "`set -- a b` is not read",
    "((A = 1, B = 2))": "arithmetic has `,` where it should end",
    "A=x; ((A[1] += 1))": r"arithmetic has `\[` where it should end",
    "case x in @(a|b)) A=1;; esac": r"the pattern '@\(a\|b\)' is not read",
    "[[ x == [[:alpha:]] ]]": "a pattern is not read",
    "[[ ( a == a && b ]]": "this is not read as bash",
    "IFS=,; A=a,b; echo $A": "another IFS are not read",
    "case a in a) A=1;;& *) B=1;; esac": "`;&` is not read",
    "cat <<E | sh\ntorchrun y\nE": "a command behind `<<` is not read",
    "unset A[0]": "is not read",
    "export $X=1": r"the declaration of \$X is not read",
}


@pytest.mark.parametrize("word", NOT_READ)
def test_a_value_that_is_not_read_is_unknown_and_named(word: str) -> None:
    arguments = launch_of(f"N=abc\nA=(1 2 3)\ntorchrun a.py {word}").arguments
    assert "at line 3 is not" in arguments[0].unknown


@pytest.mark.parametrize("script", REFUSED_CONSTRUCTS)
def test_a_construct_that_is_not_read_is_refused_by_name_and_line(script: str) -> None:
    with pytest.raises(PlanError, match=f"^line 2: .*{REFUSED_CONSTRUCTS[script]}"):
        launch_of(f"\n{script}\ntorchrun a.py")


@pytest.mark.parametrize("script", UNKNOWN)
def test_what_is_not_known_says_why_and_what_would_tell_it(script: str) -> None:
    word = launch_of(script).arguments[-1]
    assert word.unknown == UNKNOWN[script]
    name, _, value = word.unknown.rpartition("--define ")[2].partition("=")
    told = launch_of(script, **{name: "7"}).arguments  # the remedy is one
    assert not any(word.unknown for word in told), value


def test_a_define_that_the_script_does_not_ask_for_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--define TPP: the script asks for no TPP; nearest: TP"):
        launch_of("torchrun x $TP", TPP="1")
    with pytest.raises(PlanError, match=r"--define TP: the script sets TP itself at line 1"):
        launch_of("TP=1; torchrun x $TP", TP="2")


def test_options_that_one_branch_adds_may_be_any_words() -> None:
    words = launch_of('V=""; [ -d x ] && V="--vp 2"\ntorchrun a.py --data x $V --tp 2').arguments
    assert [(word.text, word.is_open) for word in words] == [
        ("--data", False), ("x", False), ("$V", True), ("--tp", False), ("2", False),
    ]  # fmt: skip


REFUSED = {
    "echo hello": "no command that starts training",
    "pip install x; python tools/preprocess_data.py": r"tools/preprocess_data.py:1 trains nothing",
    "torchrun a.py 1; torchrun a.py 2": r"starts 2 programs: a.py:1, a.py:1",
    "if [ $X = 1 ]; then torchrun train.py; fi": r"line 1: whether torchrun runs is not known: \$X at line 1",
    "[ $X = 1 ] && { export A=1; torchrun a.py; } || { export A=2; torchrun a.py; }": r"whether torchrun runs is not known: \$X",
    "if [ $# -lt 1 ]; then exit 1; fi\ntorchrun a.py": r"it ends at line 1 \(exit\)",
    "A=1\nif true; then\ntorchrun x": "line 2: this is not read as bash",
    "P=<path of data>\ntorchrun x": r"line 1: '<path of data>' is to be filled in",
    "torchrun --nproc_per_nod 8 a.py": "line 1: torchrun has no option '--nproc_per_nod'; nearest: nproc-per-node",
    "torchrun $ARGS train.py": r"line 1: what torchrun starts is not known: \$ARGS at line 1",
    "srun $ARGS torchrun train.py": r"line 1: what srun starts is not known: \$ARGS at line 1",
    "$CMD train.py": r"line 1: which command runs is not known: \$CMD",
}


@pytest.mark.parametrize("script", REFUSED)
def test_a_file_without_one_launch_is_refused(script: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[script]) as refusal:
        launch_of(script)
    assert "\n" not in str(refusal.value)


# Script; launcher, program, nodes, ranks of a node.
LAUNCHES = {
    "torchrun --nnodes=2 --nproc-per-node 4 -m torchtitan.train --x": "torchrun torchtitan.train 2 4",
    "python -u -m torch.distributed.launch --nproc_per_node=8 --use_env a/pretrain_gpt.py": "torchrun a/pretrain_gpt.py 1 8",
    "torchrun --nnodes 1:4 --nproc_per_node gpu train.py": "torchrun train.py None None",
    "torchrun --nproc_per_node=$GPUS train.py": "torchrun train.py 1 None",
    "deepspeed --num_nodes 2 --num_gpus=8 train.py --deepspeed": "deepspeed train.py 2 8",
    "deepspeed -i localhost:0,1,2 --module my.train": "deepspeed my.train 1 3",
    "accelerate launch --num_processes 16 --num_machines 2 --use_fsdp run_clm.py": "accelerate run_clm.py 2 8",
    "nohup srun -N4 --ntasks-per-node=8 --cpu-bind=none python pretrain.py": "srun pretrain.py 4 8",
    "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks=16 # ranks\nsrun --label bash -c 'python train.py'": "srun train.py 2 8",
    "#SBATCH --nodes=3 --gpus-per-node=h100:4\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE t.py": "torchrun t.py 3 4",
    "python prep.py; A=1 env B=2 uv run torchrun --standalone finetune.py 2>&1 | tee log": "torchrun finetune.py 1 1",
    "singularity exec --nv -B /a image.sif torchrun --nproc_per_node 2 train.py": "torchrun train.py 1 2",
    "llamafactory-cli train x.yaml": "llamafactory-cli llamafactory-cli None None",
    "python train.py": "python train.py None None",
}


@pytest.mark.parametrize("script", LAUNCHES)
def test_the_launch_is_found_with_its_nodes_and_ranks(script: str) -> None:
    launch = launch_of(script)
    found = (launch.launcher, launch.program.text, launch.nodes, launch.ranks_per_node)
    assert " ".join(map(str, found)) == LAUNCHES[script]


def test_the_program_chooses_among_several_launches() -> None:
    script = "torchrun a/train.py 1\ntorchrun b/train.py 2\ntorchrun b/train.py 3\n"
    assert launch_of(script, "a/train.py").arguments[0].text == "1"
    assert launch_of(script, "b/train.py:3").arguments[0].text == "3"


def test_nothing_is_executed_and_no_variable_of_the_process_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TP", "8")
    script = "touch x > y; rm -rf kept; A=$(touch z) B=`touch w`; eval touch v; bash -c 'touch u'\ntorchrun t.py $TP *"
    (tmp_path / "kept").mkdir()
    launch = launch_of(script)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert [word.text for word in launch.arguments] == ["$TP", "*"]


BOMBS = {
    "doubling": "A=xx\n" + "A=$A$A\n" * 60,
    "arrays": "A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
    "loops": "for ((i = 0; i < 900; i++)); do for ((j = 0; j < 900; j++)); do A=$i; done; done",
    "recursion": 'f() { f "$@" x; }; f',
    "eval": 'A=\'eval "$A"\'; eval "$A"',
    "parentheses": "A=$((" + "(" * 5_000 + "1" + ")" * 5_000 + "))",
    "substitutions": "$(" * 3_000 + "true" + ")" * 3_000,
    "pattern": "A=" + "a" * 20_000 + "\necho ${A##a*a*b}",
    "branches": "".join(f"[ $X{at} = 1 ] && A{at}=1\n" for at in range(5_000)),
    "large": "A=1\n" * 100_000,
    "mark": "A=\U000f0000",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_one_line(name: str) -> None:
    start = time.process_time()
    with pytest.raises(PlanError) as refusal:
        read_commands(BOMBS[name], file=None, defines={})
    assert "\n" not in str(refusal.value)
    assert time.process_time() - start < 3  # a second on an idle machine
