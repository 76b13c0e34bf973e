# Names that only a server or a file knows.
function __exec_server_names
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    $program __complete (commandline -ct) $words 2>/dev/null
end

complete -c exec-server -n "__fish_exec_server_using_subcommand kill" -f -a '(__exec_server_names)'
complete -c exec-server -n "__fish_exec_server_using_subcommand cp" -a '(__exec_server_names)'
complete -c exec-server -n "__fish_exec_server_using_subcommand env; and __fish_seen_subcommand_from remove status use" -f -a '(__exec_server_names)'
complete -c exec-server -n "__fish_exec_server_using_subcommand fs; and not __fish_seen_subcommand_from put" -f -a '(__exec_server_names)'
complete -c exec-server -n "__fish_exec_server_using_subcommand fs; and __fish_seen_subcommand_from put" -a '(__exec_server_names)'
