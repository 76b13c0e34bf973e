//! `shellSnapshot` of `process/start`: start-up files run once, and commands see no difference.

use std::path::{Path, PathBuf};

use exec_server_testkit::proc::{all_gone, bearers, marker};
use exec_server_testkit::wire::{
    ObservedProcess, StartBuilder, TestedServer, Transport, WireClient,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{over_all, program, served};

over_all! {
    start_up_files_run_once_per_snapshot_scope,
}

/// A user with start-up files that the test writes.
struct ShellUser {
    home: PathBuf,
    _directory: TempDir,
    _subject: TestedServer,
    client: WireClient,
    started: u32,
}

impl ShellUser {
    async fn new(on: Transport, settings: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path().canonicalize().unwrap();
        let mut command = program();
        // Temporary files, if any, are created where the test can see them.
        command.env("HOME", &home).env("TMPDIR", &home);
        for setting in settings {
            command.args(["--set", setting]);
        }
        let mut subject = TestedServer::start(on, command).await;
        let client = subject.session().await;
        Self {
            home,
            _directory: directory,
            _subject: subject,
            client,
            started: 0,
        }
    }

    /// Writes a start-up file that records each run.
    fn profile(&self, name: &str, text: &str) {
        let text = format!("echo x >> {}\n{text}\n", self.count_file().display());
        std::fs::write(self.home.join(name), text).unwrap();
    }

    fn count_file(&self) -> PathBuf {
        self.home.join("count")
    }

    /// Number of runs of the start-up files.
    fn count(&self) -> usize {
        std::fs::read_to_string(self.count_file()).map_or(0, |text| text.lines().count())
    }

    /// A command in a login shell, with a snapshot of this scope.
    fn start(&mut self, shell: &str, scope: &str, command: &str) -> StartBuilder {
        self.started += 1;
        let name = Path::new(shell).file_name().unwrap().to_str().unwrap();
        let id = format!("{scope} {}", self.started);
        StartBuilder::new(&id, &[shell, "-lc", command])
            .with("cwd", format!("file://{}", self.home.display()))
            .with("env", json!({}))
            .with("envPolicy", everything())
            .with("shellSnapshot", wanted(scope, name, shell))
    }

    async fn run(&mut self, shell: &str, scope: &str, command: &str) -> &ObservedProcess {
        let start = self.start(shell, scope, command);
        self.client.run(start).await
    }

    async fn says(&mut self, shell: &str, scope: &str, command: &str) -> String {
        self.run(shell, scope, command).await.text("stdout")
    }
}

fn wanted(scope: &str, name: &str, path: &str) -> Value {
    json!({"scopeId": scope, "shell": {"name": name, "path": path}})
}

fn everything() -> Value {
    json!({
        "inherit": "all", "ignoreDefaultExcludes": true, "exclude": [], "set": {},
        "includeOnly": [],
    })
}

const BASH: &str = "/bin/bash";

/// State that a bash user may have; commands must not see whether it came from a snapshot.
const PROFILE: &str = r#"
shopt -s extglob expand_aliases
f() { case $1 in @(a|b)) echo "a or b";; *) echo "it's '$1'";; esac; }
g() { cat <<'EOF'
here $doc
EOF
}
export -f g
alias greet='echo "hello, it'\''s"'
export WORDS="two
lines" PATH="/extra:$PATH"
unset GONE
set -o pipefail
umask 027
trap 'echo "and bye"' EXIT
"#;

async fn start_up_files_run_once_per_snapshot_scope(on: Transport) {
    let mut user = ShellUser::new(on, &[]).await;
    assert_eq!(
        user.client.session["environmentInfo"]["capabilities"]["shellSnapshotV2"],
        true
    );
    user.profile(".bash_profile", PROFILE);
    let command = "f a; f x; bash -c g; greet; echo \"$WORDS $PATH\"; umask; false | true; echo $?";
    let expected = "a or b\nit's 'x'\nhere $doc\nhello, it's\ntwo\nlines";
    for round in 1..=3 {
        let printed = user.says(BASH, "s", command).await;
        assert!(printed.starts_with(expected), "{round}: {printed}");
        assert!(printed.contains(" /extra:/"), "{round}: {printed}");
        assert!(
            printed.ends_with("\n0027\n1\nand bye\n"),
            "{round}: {printed}"
        );
        assert_eq!(user.count(), 1);
    }
    // Another scope or directory has another snapshot.
    user.says(BASH, "t", "true").await;
    assert_eq!(user.count(), 2);
    let elsewhere = user.start(BASH, "s", "pwd").with("cwd", "file:///");
    assert_eq!(
        user.client.run(elsewhere).await.text("stdout"),
        "/\nand bye\n"
    );
    assert_eq!(user.count(), 3);
}

/// A command sees the same, whether it runs first, later, or without a snapshot.
#[tokio::test]
async fn commands_see_the_same_state_with_and_without_a_snapshot() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    user.profile(".bash_profile", PROFILE);
    for command in [
        "env | grep -v ^SHLVL= | sort",
        "alias; declare -f; declare -Fx; trap -p",
        "set +o | grep -v privileged",
        "shopt -p | grep -v login_shell",
        "exit 7",
        "kill -TERM $$",
        "echo \"$0 $# $1 $2\"",
        "nonsense --option",
        "cat <<'X'\nit's \"quoted\" \\ $HOME\nX",
    ] {
        let plain = user
            .start(BASH, "s", command)
            .with("shellSnapshot", Value::Null);
        let seen = |seen: &ObservedProcess| (seen.text("stdout"), seen.exit_code());
        let plain = seen(user.client.run(plain).await);
        for _ in 0..2 {
            assert_eq!(seen(user.run(BASH, "s", command).await), plain, "{command}");
        }
    }
    let mut start = user.start(BASH, "s", "echo \"$0 $# $1 $2\"");
    for more in ["name", "first", "se'cond"] {
        start.0["argv"].as_array_mut().unwrap().push(json!(more));
    }
    let printed = user.client.run(start).await.text("stdout");
    assert_eq!(printed, "name 2 first se'cond\nand bye\n");
}

#[tokio::test]
async fn request_environment_overrides_start_up_files() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    let text = "export A=file B=file MY_TOKEN=file EXTRA=file; unset C D";
    user.profile(".bash_profile", text);
    let print = "echo \"$A ${B-} ${C-} ${D-} ${MY_TOKEN-} ${EXTRA-}\"";
    let policy = json!({
        "inherit": "core", "ignoreDefaultExcludes": false, "exclude": ["EXT*"],
        "set": {"D": "policy"}, "includeOnly": [],
    });
    for _ in 0..2 {
        let mut start = user
            .start(BASH, "s", print)
            .with("envPolicy", policy.clone());
        start.0["env"]["A"] = json!("asked");
        start.0["env"]["C"] = json!("asked");
        let printed = user.client.run(start).await.text("stdout");
        assert_eq!(printed, "asked file asked   \n");
    }
    assert_eq!(user.count(), 1);
    // The environment of one request is not used for the next.
    let start = user.start(BASH, "s", print).with("envPolicy", policy);
    let printed = user.client.run(start).await.text("stdout");
    assert_eq!(printed, "file file    \n");
    assert_eq!(user.count(), 1);
}

#[tokio::test]
async fn snapshots_work_for_zsh_and_sh() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    user.profile(
        ".zprofile",
        "setopt extendedglob\nf() { print -r -- \"f $1\" }\nalias ll='print aliased'\n\
         alias -s made=print\nexport Z=z\numask 027",
    );
    let command = "f 'x y'\nll\nthing.made\nprint $Z $options[extendedglob] $(umask) $0 $#";
    for _ in 0..3 {
        let printed = user.says("/bin/zsh", "z", command).await;
        assert_eq!(printed, "f x y\naliased\nthing.made\nz on 027 /bin/zsh 0\n");
    }
    assert_eq!(user.count(), 1);
    std::fs::remove_file(user.count_file()).unwrap();
    user.profile(
        ".profile",
        "alias ll='echo aliased'; export S=s; umask 027; set -o noglob",
    );
    for _ in 0..3 {
        let printed = user.says("/bin/sh", "s", "ll\necho * $S $(umask)").await;
        assert_eq!(printed, "aliased\n* s 0027\n");
    }
    assert_eq!(user.count(), 1);
}

#[tokio::test]
async fn snapshots_are_taken_only_for_login_shells_with_a_command() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    user.profile(".bash_profile", "");
    for argv in [
        json!([BASH, "-c", "echo ok"]),
        json!(["/usr/bin/bash", "-c", "echo ok"]),
        json!(["echo", "ok"]),
    ] {
        let start = user.start(BASH, "s", "").with("argv", argv);
        assert_eq!(user.client.run(start).await.text("stdout"), "ok\n");
    }
    assert_eq!(user.count(), 0);
    for (scope, name, reason) in [
        (
            "s",
            "fish",
            "shell snapshots are unsupported for shell `fish`",
        ),
        ("", "bash", "must be 1 to 256 bytes"),
        (&*"x".repeat(257), "bash", "must be 1 to 256 bytes, not 257"),
    ] {
        let start = user.start(BASH, "s", "true");
        let start = start.with("shellSnapshot", wanted(scope, name, BASH));
        let refused = user.client.refused("process/start", start.0).await;
        assert_eq!(refused.code, -32602);
        assert!(refused.message.contains(reason), "{refused}");
    }
    let start = user
        .start(BASH, "s", "true")
        .with("shellSnapshot", json!({"scopeId": "s"}));
    assert_eq!(
        user.client.refused("process/start", start.0).await.code,
        -32602
    );
}

/// Start-up files that fail the first time, or always: commands run as if without a snapshot.
#[tokio::test]
async fn failed_snapshot_falls_back_to_an_ordinary_start() {
    let mut user = ShellUser::new(Transport::Websocket, &["times.shell_snapshot=2s"]).await;
    let marker = marker();
    let once = |text: &str| format!("[ -e once ] || {{ touch once; {text}; }}");
    let huge = "eval \"f() { : $(printf %0600000d 1); }\"";
    for (scope, text) in [
        ("hangs", &*once("sleep 600")),
        (
            "hangs with others",
            &once("sleep 600 & (setsid sleep 600 &); sleep 600"),
        ),
        ("exits", &once("exit 1")),
        ("is killed", &once("kill -9 $$")),
        ("prints", "head -c 1000000 /dev/zero | tr '\\0' x"),
        ("is huge", huge),
        (
            "is not text",
            "f() { echo $'\\xff'; }; eval \"$(printf 'g() { echo \\377; }')\"",
        ),
        ("closes its output", &once("exec >&-")),
        (
            "is noisy to the end",
            &once("(while echo noise; do sleep 0.01; done) & true"),
        ),
    ] {
        user.profile(".bash_profile", &format!("{text}\nexport FOO=bar"));
        let _ = std::fs::remove_file(user.home.join("once"));
        for _ in 0..2 {
            let start = user
                .start(BASH, scope, "echo \"<$FOO>\"; exit 3")
                .env("M", &marker);
            let seen = user.client.run(start).await;
            assert_eq!(seen.exit_code(), 3, "{scope}");
            assert!(seen.text("stdout").contains("<bar>"), "{scope}");
        }
    }
    user.client.ok("session/end", Value::Null).await;
    all_gone(&marker).await;
}

/// A background process that start-up files start, such as an agent, serves later commands and ends
/// with the session.
#[tokio::test]
async fn background_process_of_start_up_files_ends_with_the_session() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    let marker = marker();
    user.profile(
        ".bash_profile",
        "setsid sleep 600 </dev/null >/dev/null 2>&1 & export AGENT=$!",
    );
    for _ in 0..2 {
        let start = user
            .start(BASH, "s", "kill -0 $AGENT && echo alive")
            .env("M", &marker);
        assert_eq!(user.client.run(start).await.text("stdout"), "alive\n");
    }
    assert_eq!(user.count(), 1);
    assert_eq!(bearers(&marker).len(), 1);
    user.client.ok("session/end", Value::Null).await;
    all_gone(&marker).await;
}

/// Commands that start together share one snapshot, and a terminal uses it as well.
#[tokio::test]
async fn concurrent_commands_share_one_snapshot() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    user.profile(".bash_profile", "sleep 0.3; export FOO=bar");
    let mut ids = Vec::new();
    for n in 0..8 {
        let mut start = user.start(BASH, "s", "echo $FOO");
        if n % 2 == 1 {
            start = start.tty();
        }
        ids.push(start.0["processId"].as_str().unwrap().to_owned());
        user.client.send("process/start", start.0).await;
    }
    for id in ids {
        let seen = user.client.closed(&id).await;
        let printed = seen.text("stdout") + &seen.text("pty");
        assert_eq!(printed.trim_end(), "bar");
    }
    assert_eq!(user.count(), 1);
}

/// The snapshot is taken under the same policy as the command.
#[tokio::test]
async fn snapshot_of_a_sandboxed_shell_is_taken_in_its_sandbox() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    let profile = "touch was-here 2>/dev/null; f() { echo f; }; export FOO=bar";
    std::fs::write(user.home.join(".bash_profile"), profile).unwrap();
    let entries =
        json!([{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}]);
    let sandbox = json!({
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": "restricted"
        },
        "windowsSandboxLevel": "disabled"
    });
    for _ in 0..2 {
        let start = user.start(BASH, "s", "f; echo $FOO");
        let start = start.with("sandbox", sandbox.clone());
        assert_eq!(user.client.run(start).await.text("stdout"), "f\nbar\n");
    }
    assert!(!user.home.join("was-here").exists());
    // Another policy has another snapshot.
    assert_eq!(user.says(BASH, "s", "f; echo $FOO").await, "f\nbar\n");
    assert!(user.home.join("was-here").exists());
}

/// With more scopes than are kept, the oldest snapshot is taken again.
#[tokio::test]
async fn least_recently_used_snapshot_is_evicted() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    user.profile(".bash_profile", "");
    for n in 0..17 {
        user.says(BASH, &n.to_string(), "true").await;
    }
    assert_eq!(user.count(), 17);
    user.says(BASH, "16", "true").await;
    assert_eq!(user.count(), 17);
    user.says(BASH, "0", "true").await;
    assert_eq!(user.count(), 18);
}

#[tokio::test]
async fn snapshot_state_is_not_in_the_environment_of_commands() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join(".bash_profile"), "f() { :; }").unwrap();
    for n in 0..2 {
        let start = StartBuilder::new(&n.to_string(), &[BASH, "-lc", "env; set"])
            .with(
                "env",
                json!({"HOME": directory.path(), "PATH": "/usr/bin:/bin"}),
            )
            .with("shellSnapshot", wanted("s", "bash", BASH));
        let printed = client.run(start).await.text("stdout");
        let variables = printed.lines().filter(|line| line.contains("SNAPSHOT_0="));
        assert_eq!(variables.count(), 0, "{printed}");
    }
}

/// The state of a shell may be secret: no file holds it, neither while it is read nor afterwards.
#[tokio::test]
async fn snapshots_are_never_written_to_a_file() {
    let mut user = ShellUser::new(Transport::Websocket, &[]).await;
    let files = ".bash_profile\ncount\nseen\n";
    user.profile(".bash_profile", "f() { :; }\nls -A \"$TMPDIR\" > seen");
    for round in 0..2 {
        let printed = user.says(BASH, "s", "f && ls -A \"$TMPDIR\"").await;
        assert_eq!(printed, files, "{round}");
    }
    assert_eq!(user.count(), 1);
    let seen = std::fs::read_to_string(user.home.join("seen")).unwrap();
    assert_eq!(seen, files);
}
