#!/usr/bin/env bash
# Runs `make demo`: index, search, ask. Run from the repository root.
set -euo pipefail

bin=${BIN:-.venv/bin}
demo=${DEMO:-.demo}
kb=$demo/kb
PATH=$(cd "$bin" && pwd):$PATH

bold='' dim='' plain=''
if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

say() { printf '\n%s# %s%s\n' "$dim" "$1" "$plain"; }

# Prints a command line, then runs it.
run() {
  local arg line=''
  for arg in "$@"; do
    [[ $arg == *[[:space:]]* ]] && arg="\"$arg\""
    line+=" $arg"
  done
  printf '%s$%s%s\n' "$bold" "$line" "$plain"
  "$@"
}

mkdir -p "$demo"

questions=()
while IFS= read -r question; do
  [[ -n $question ]] && questions+=("$question")
done < examples/demo_questions.txt

say "Index this project's documentation and a small gazetteer of an invented country."
run stillroom add docs examples/gazetteer --kb "$kb"

say "Search, without a language model."
run stillroom search "how are documents cut into chunks" --kb "$kb" -k 3

say "Ask: each question starts from the answer before it."
run stillroom ask "${questions[@]}" --kb "$kb"

say "Ask the first question again in a new process, with the KV kept on disk. Then explain its timing."
run stillroom ask "${questions[0]}" --kb "$kb"
run stillroom explain --kb "$kb"

say "Next"
cat <<NEXT
  As data:         $bin/stillroom ask "${questions[0]}" --kb $kb --json
  Over HTTP:       $bin/stillroom serve --kb $kb
                   curl localhost:8321/v1/chat/completions -H 'Content-Type: application/json' \\
                     -d '{"model": "bundled", "messages": [{"role": "user", "content": "${questions[0]}"}]}'
  Your documents:  $bin/stillroom add PATH --kb ./kb && $bin/stillroom ask "..." --kb ./kb --model PATH_OR_HF_NAME
NEXT
