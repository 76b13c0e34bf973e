//! Completion in real shells: a person types, and presses Tab.

use std::process::Stdio;

use bytes::Bytes;
use exec_server::executor::{
    Executor, ExecutorConfig, Process, ProcessSpec, PtySize, Stdio as ChildStdio,
};
use exec_server_testkit::server::ServerProcess;

use super::{BINARY, run_with, server, until};

/// A shell at its prompt, in which this program's completion script was read.
struct Shell {
    process: Process,
    /// Prompts that were shown.
    prompts: usize,
    _directory: tempfile::TempDir,
}

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

impl Shell {
    async fn start(name: &str, server: &ServerProcess) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |file: &str| directory.path().join(file);
        std::os::unix::fs::symlink(BINARY, at("exec-server")).unwrap();
        std::fs::create_dir(at("settings")).unwrap();
        let list = format!(
            "[[environments]]\nid = \"build-box\"\nurl = \"{}\"\n",
            server.url()
        );
        std::fs::write(at("settings/environments.toml"), list).unwrap();
        let script = run_with(None, &["completions", name], b"").stdout;
        std::fs::write(at("script"), script).unwrap();
        let script = at("script").display().to_string();
        // Each shows a prompt with a number: <1>, <2> and so on.
        let (argv, first) = match name {
            "bash" => (
                vec!["bash", "--norc", "--noprofile"],
                "N=0; PROMPT_COMMAND='N=$((N+1))'; PS1='<$N>'",
            ),
            "zsh" => (
                vec!["zsh", "-f"],
                "autoload -U compinit; compinit -u -D; setopt promptsubst; N=0; precmd() { \
                 N=$((N+1)) }; PS1='<$N>'",
            ),
            _ => (
                vec!["fish", "--no-config"],
                "set -g N 0; function count --on-event fish_prompt; set -g N (math $N+1); end; \
                 function fish_prompt; echo -n \"<$N>\"; end",
            ),
        };
        let path = format!("{}:/usr/bin:/bin", directory.path().display());
        let env = [
            ("PATH", path.as_str()),
            ("TERM", "dumb"),
            ("HOME", directory.path().to_str().unwrap()),
            ("EXEC_SERVER_HOME", at("settings").to_str().unwrap()),
            ("EXEC_SERVER_URL", server.url()),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let spec = ProcessSpec {
            argv: argv.into_iter().map(str::to_owned).collect(),
            cwd: directory.path().into(),
            env: env.into(),
            stdio: ChildStdio::Terminal(PtySize {
                rows: 50,
                cols: 400,
            }),
            ..ProcessSpec::default()
        };
        let executor = Executor::new(ExecutorConfig::default()).unwrap();
        let process = executor.start(spec).await.unwrap();
        let shell = Self {
            process,
            prompts: 0,
            _directory: directory,
        };
        shell.types(&format!("{first}; . {script}\r"));
        shell
    }

    fn types(&self, keys: &str) {
        assert!(self.process.try_write(Bytes::from(keys.to_owned())).is_ok());
    }

    /// Types a line and Tab, and then prints the line that the shell made of it.
    async fn completes(&mut self, typed: &str, expected: &str) {
        self.prompts += 1;
        until(&self.process, &format!("<{}>", self.prompts)).await;
        // ^A is the beginning of the line; the quotes distinguish what is printed from what is typed.
        self.types(&format!("{typed}\t\x01echo go''t= \r"));
        until(&self.process, &format!("got= {expected}")).await;
    }
}

/// A process of the server that runs until the server ends.
async fn running(server: &ServerProcess) -> (tokio::process::Child, String) {
    let mut child = tokio::process::Command::new(BINARY)
        .args([
            "run",
            "--url",
            server.url(),
            "--",
            "sh",
            "-c",
            "echo up; sleep 600",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    let stdout = child.stdout.as_mut().unwrap();
    tokio::io::AsyncReadExt::read_exact(stdout, &mut up)
        .await
        .unwrap();
    let id = format!("run-{}", child.id().unwrap());
    (child, id)
}

async fn shell_completes(name: &str) {
    let server = server().await;
    let (_running, id) = running(&server).await;
    let mut shell = Shell::start(name, &server).await;
    let there = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(there.path().join("srv/applications")).unwrap();
    let at = |path: &str| there.path().join(path).display().to_string();
    for (typed, expected) in [
        ("exec-server dae", "exec-server daemon"),
        ("exec-server config sh", "exec-server config show"),
        ("exec-server run --time", "exec-server run --timeout"),
        (
            "exec-server run --on build-",
            "exec-server run --on build-box",
        ),
        ("exec-server env use bui", "exec-server env use build-box"),
        ("exec-server kill run-", &format!("exec-server kill {id}")),
        (
            &format!("exec-server fs ls {}", at("sr")),
            &format!("exec-server fs ls {}", at("srv/")),
        ),
        (
            &format!("exec-server fs --on build-box ls {}", at("srv/app")),
            &format!(
                "exec-server fs --on build-box ls {}",
                at("srv/applications/")
            ),
        ),
        ("exec-server cp x build-b", "exec-server cp x build-box:"),
        (
            &format!("exec-server cp x build-box:{}", at("srv/app")),
            &format!("exec-server cp x build-box:{}", at("srv/applications/")),
        ),
        (
            &format!("exec-server cp :{}", at("srv/app")),
            &format!("exec-server cp :{}", at("srv/applications/")),
        ),
        (
            "exec-server cp settings/envi",
            "exec-server cp settings/environments.toml",
        ),
    ] {
        shell.completes(typed, expected).await;
    }
}

#[tokio::test]
async fn bash_completes_commands_options_and_names() {
    shell_completes(SHELLS[0]).await;
}

#[tokio::test]
async fn zsh_completes_commands_options_and_names() {
    shell_completes(SHELLS[1]).await;
}

#[tokio::test]
async fn fish_completes_commands_options_and_names() {
    shell_completes(SHELLS[2]).await;
}

#[test]
fn names_of_a_server_that_does_not_answer_take_a_second() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    let since = std::time::Instant::now();
    let output = run_with(Some(&url), &["__complete", "run-", "kill"], b"");
    assert_eq!((output.stdout.len(), output.status.code()), (0, Some(0)));
    // One second, and as much as a busy machine may add.
    assert!(since.elapsed() < std::time::Duration::from_secs(5));
}
