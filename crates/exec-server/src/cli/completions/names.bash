# Completes names that only a server or a file knows; calls _exec__server elsewhere.
_exec_server_names() {
    # Not COMP_WORDS: those are split at colons, which are a part of names.
    local line=${COMP_LINE:0:COMP_POINT} word="" found status name before
    local -a words
    read -ra words <<<"$line"
    if [[ $line != *[[:space:]] ]]; then
        word=${words[${#words[@]} - 1]}
        unset "words[${#words[@]} - 1]"
    fi
    found=$("${1/#\~\//$HOME/}" __complete "$word" "${words[@]:1}" 2>/dev/null)
    status=$?
    if [[ $status != 0 && $status != 2 ]]; then
        _exec__server "$@"
        return
    fi
    COMPREPLY=()
    # Only what follows the last colon or equals sign is replaced.
    before=${word%"${word##*[:=]}"}
    while IFS= read -r name; do
        [[ -n $name ]] && COMPREPLY+=("$(printf %q "${name#"$before"}")")
    done <<<"$found"
    if [[ $status == 2 ]]; then
        while IFS= read -r name; do
            [[ -n $name ]] && COMPREPLY+=("$(printf %q "${name#"$before"}")")
        done < <(compgen -f -- "$word")
    fi
    [[ ${COMPREPLY[0]-} == *[:/] ]] && compopt -o nospace 2>/dev/null
    return 0
}

if [[ ${BASH_VERSINFO[0]} -eq 4 && ${BASH_VERSINFO[1]} -ge 4 || ${BASH_VERSINFO[0]} -gt 4 ]]; then
    complete -F _exec_server_names -o nosort -o bashdefault -o default exec-server
else
    complete -F _exec_server_names -o bashdefault -o default exec-server
fi
