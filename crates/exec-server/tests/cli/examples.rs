//! Runs the examples of the crate.

use exec_server::environment::ConfiguredEnvironments;

use super::server;

#[expect(dead_code, reason = "the test binary defines `main`")]
#[path = "../../examples/anywhere.rs"]
mod anywhere;
#[expect(dead_code, reason = "the test binary defines `main`")]
#[path = "../../examples/everywhere.rs"]
mod everywhere;

/// A configuration with this file content, and this value of `EXEC_SERVER_URL`.
fn configured(text: &str, url: Option<&str>) -> (tempfile::TempDir, ConfiguredEnvironments) {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("environments.toml"), text).unwrap();
    let configured = ConfiguredEnvironments::new(|name| match name {
        "EXEC_SERVER_HOME" => Some(home.path().to_str().unwrap().to_owned()),
        "EXEC_SERVER_URL" => url.map(str::to_owned),
        _ => None,
    });
    (home, configured)
}

/// A command that prints the pid of its parent.
fn command() -> Vec<String> {
    ["/bin/sh", "-c", "echo $PPID"].map(str::to_owned).to_vec()
}

#[tokio::test]
async fn example_anywhere_uses_the_configured_environment() {
    let server = server().await;
    for (text, url, place) in [
        (String::new(), None, "local: "),
        (String::new(), Some(server.url()), "remote: "),
        (
            format!(
                "default = 'w'\n[[environments]]\nid = 'w'\nurl = '{}'",
                server.url()
            ),
            None,
            "w: ",
        ),
    ] {
        let (_home, configured) = configured(&text, url);
        let mut out = Vec::new();
        let command = ["echo", "hello"].map(str::to_owned).to_vec();
        anywhere::run(configured, command, &mut out).await.unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), format!("{place}hello\n"));
    }
    let (_home, configured) = configured("default = 'none'", None);
    let refused = anywhere::run(configured, command(), &mut Vec::new()).await;
    assert!(refused.is_err());
}

#[tokio::test]
async fn example_everywhere_runs_in_all_environments() {
    let (one, two) = (server().await, server().await);
    let entry = |id: &str, url: &str| format!("[[environments]]\nid = '{id}'\nurl = '{url}'\n");
    let text = format!(
        "{}{}{}",
        entry("two", two.url()),
        entry("gone", "unix:///nonexistent/socket"),
        entry("one", one.url())
    );
    let (_home, configured) = configured(&format!("default = 'one'\n{text}"), None);
    let mut out = Vec::new();
    everywhere::run(configured, command(), &mut out)
        .await
        .unwrap();
    let printed = String::from_utf8(out).unwrap();
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(lines.len(), 4, "{printed}");
    for (line, start) in lines
        .iter()
        .zip(["one: ", "local: ", "two: ", "gone failed: "])
    {
        assert!(line.starts_with(start), "{printed}");
    }
    // Each ran in its environment: locally, and on two servers.
    let here = std::process::id().to_string();
    assert_eq!(lines[1], format!("local: {here}"));
    let [one, two] = [lines[0], lines[2]].map(|line| line.split_once(": ").unwrap().1);
    assert!(one != two && one != here && two != here, "{printed}");
}

#[tokio::test]
async fn connect_takes_local_and_a_url() {
    let server = server().await;
    for target in ["local", server.url()] {
        let machine = exec_server::connect(target).await.unwrap();
        let script = "pwd; echo $HOME; exit 3";
        let output = machine.run(["sh", "-c", script]).await.unwrap();
        let here = std::env::current_dir().unwrap();
        let home = std::env::var("HOME").unwrap_or_default();
        let expected = format!("{}\n{home}\n", here.display());
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            expected,
            "{target}"
        );
        assert_eq!(output.exit.unwrap().exit_code, 3, "{target}");
        // Two at a time.
        let (one, other) = tokio::join!(machine.run(["echo", "1"]), machine.run(["echo", "2"]));
        assert_eq!(
            [one.unwrap().stdout, other.unwrap().stdout].concat(),
            b"1\n2\n"
        );
    }
    for (target, says) in [
        ("ws://127.0.0.1:1", "cannot connect to `ws://127.0.0.1:1`"),
        ("nonsense://x", "nonsense"),
        ("no-such-environment", "there is no such environment"),
    ] {
        let error = exec_server::connect(target).await.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
