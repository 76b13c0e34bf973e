# Completes names that only a server or a file knows; calls _exec-server-static elsewhere.
_exec-server() {
    local found code
    local -a names whole parts
    found=$("${(Q)words[1]/#\~\//$HOME/}" __complete "${(Q)PREFIX}" "${(@Q)words[2,CURRENT-1]}" 2>/dev/null)
    code=$?
    if (( code != 0 && code != 2 )); then
        _exec-server-static "$@"
        return
    fi
    names=("${(@f)found}")
    whole=("${(@)names:#(*[:\/]|)}")
    parts=("${(@M)names:#*[:\/]}")
    (( $#whole )) && compadd -a whole
    # More follows a directory, or the name of a machine.
    (( $#parts )) && compadd -S '' -a parts
    (( code == 2 )) && _files
    (( $#whole || $#parts || code == 2 ))
}
