#!/usr/bin/env bash
# Runs `make demo`: add documents, ask, open a passage, reuse KV. Run from the repository root.
set -euo pipefail

bin=${BIN:-.venv/bin}
demo=${DEMO:-.demo}
kb=$demo/kb
gazetteer=$demo/gazetteer
passage=examples/household/housekeeper.md:87-96
PATH=$(cd "$bin" && pwd):$PATH

bold='' dim='' plain=''
if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'
fi

step=start
trap '(( $? == 0 )) || printf "\nThe demo failed at: %s\n" "$step" >&2' EXIT

say() { printf '\n%s# %s%s\n' "$dim" "$1" "$plain"; }

# Prints a command line as it can be typed.
show() {
  local arg line=''
  for arg in "$@"; do
    [[ $arg == *[[:space:]]* ]] && arg="\"$arg\""
    line+=" $arg"
  done
  step=${line# }
  printf '%s$%s%s\n' "$bold" "$line" "$plain"
}

# Prints a command line, then runs it.
run() {
  show "$@"
  "$@"
}

mkdir -p "$demo"

say "1. Add documents: ten chapters of a housekeeping book of 1861, and the documentation of this project."
run stillroom add examples/household --kb "$kb"
run stillroom add docs --exclude figures/ --exclude _site/ --kb "$kb"

mapfile -t questions < examples/demo_questions.txt
say "2. Ask. The bundled reader answers in the documents' own words; [n] is the number of the source."
run stillroom ask "${questions[0]}" --kb "$kb" --top-k 3

say "More questions to the book and to the documentation, in one process. The documents do not answer the last one."
show stillroom ask - --kb "$kb" --json '<' examples/demo_questions.txt '|' python examples/answers.py \
  examples/demo_questions.jsonl
stillroom ask - --kb "$kb" --json < examples/demo_questions.txt | python examples/answers.py examples/demo_questions.jsonl

say "3. Open the passage behind the first answer."
run stillroom show "$passage" --kb "$kb"

say "4. A language model keeps what it computed of a passage. This tiny one knows only an invented country."
mapfile -t questions < examples/gazetteer_questions.txt
run stillroom add examples/gazetteer --kb "$gazetteer" --quiet
run stillroom ask "${questions[0]}" "${questions[1]}" --kb "$gazetteer" --model bundled:microworld --top-k 2
say "The first question again, in a new process: the KV of its passages is on disk. Then where each part came from."
run stillroom ask "${questions[0]}" --kb "$gazetteer" --model bundled:microworld --top-k 2
run stillroom explain --kb "$gazetteer"

say "The demo took $SECONDS s. Next, with files of your own:"
cat <<NEXT
  source $bin/activate
  stillroom add PATH --kb ./kb                       # files and folders: PDF, Word, Markdown, HTML, code ...
  stillroom ask "..." --kb ./kb                      # the reader quotes them
  stillroom serve --kb ./kb                          # a console in the browser, and OpenAI's API
  stillroom ask "..." --kb ./kb --model MODEL        # a language model writes: a folder or a Hugging Face name
NEXT
