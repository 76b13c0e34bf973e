//! `fs mkdir`, `fs chmod`, `fs tail` and `fs edit`, locally and on a server.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::process::{Child, Command, Stdio};

use super::{CliFixture, CommandOutput, see};

impl CliFixture {
    /// Runs a command on the server, or locally in the server's directory.
    fn run_at(&self, remote: bool, args: &[&str]) -> CommandOutput {
        let mut command = self.command(args);
        if !remote {
            command.env_remove("EXEC_SERVER_URL");
            command.current_dir(self.there(""));
        }
        see(&mut command)
    }
}

#[tokio::test]
async fn mkdir_creates_directories_with_parents_and_modes() {
    let test = CliFixture::new().await;
    for remote in [true, false] {
        let run = |args: &[&str]| test.run_at(remote, args);
        let root = if remote { "r" } else { "l" };
        run(&["fs", "mkdir", root]).ok();
        run(&["fs", "mkdir", root]).fails(1, &["cannot create", root, "exists"]);
        run(&["fs", "mkdir", "-p", root]).ok();
        let deep = format!("{root}/a/b");
        run(&["fs", "mkdir", &deep]).fails(1, &[&deep, "No such file"]);
        run(&["fs", "mkdir", "-p", "-m", "710", &deep]).ok();
        let mode = |name: &str| fs::metadata(test.there(name)).unwrap().mode() & 0o7777;
        assert_eq!(mode(&deep), 0o710);
        let usual = fs::metadata(test.there(root)).unwrap().mode() & 0o7777;
        assert_eq!(mode(&format!("{root}/a")), usual);
        run(&["fs", "mkdir", "-p", "-m", "777", &deep]).ok();
        assert_eq!(mode(&deep), 0o710, "an existing directory keeps its mode");
        assert_eq!(run(&["fs", "mkdir", "-m", "8", "x"]).code, Some(2));
    }
}

#[tokio::test]
async fn chmod_changes_modes_as_chmod_does() {
    let test = CliFixture::new().await;
    let expected = test.here("tree");
    for root in [&test.there("tree"), &expected] {
        fs::create_dir_all(root.join("sub")).unwrap();
        for (name, mode) in [("plain", 0o640), ("script", 0o750), ("sub/deep", 0o600)] {
            fs::write(root.join(name), "").unwrap();
            fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink("plain", root.join("link")).unwrap();
    }
    let outside = test.there("outside");
    fs::write(&outside, "").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&outside, test.there("tree/sub/out")).unwrap();
    for (mode, remote) in [
        ("755", true),
        ("u+s", false),
        ("u=rwX,go=rX", true),
        ("go-r", false),
        ("-w", true),
        ("a+rwx", true),
        ("o=", false),
        ("u=rwX,go=", true),
    ] {
        test.run_at(remote, &["fs", "chmod", "-R", mode, "tree"])
            .ok();
        // With `--`, since this `chmod` takes a leading dash for an option.
        let mut reference = Command::new("chmod");
        let mode_given = if mode == "-w" { "a-w" } else { mode };
        let status = reference
            .args(["-R", "--", mode_given])
            .arg(&expected)
            .status();
        assert!(status.unwrap().success());
        for name in ["", "plain", "script", "sub", "sub/deep"] {
            let mode_of = |path| fs::metadata(path).unwrap().mode() & 0o7777;
            let (ours, theirs) = (test.there("tree").join(name), expected.join(name));
            assert_eq!(mode_of(ours), mode_of(theirs), "{mode} {name}");
        }
    }
    assert_eq!(fs::metadata(&outside).unwrap().mode() & 0o7777, 0o600);
    test.run(&["fs", "chmod", "600", "missing", "tree/plain"])
        .fails(1, &["missing", "No such file"]);
    let mode = fs::metadata(test.there("tree/plain")).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o600);
    assert_eq!(test.run(&["fs", "chmod", "u+q", "tree"]).code, Some(2));
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn tail_prints_the_last_lines_and_what_is_added() {
    let test = CliFixture::new().await;
    let path = test.there("log");
    let lines: String = (0..30_000).map(|n| format!("line {n}\n")).collect();
    fs::write(&path, &lines).unwrap();
    for remote in [true, false] {
        for (count, file) in [
            ("3", "log"),
            ("20000", "log"),
            ("99999", "log"),
            ("0", "log"),
        ] {
            let expected = Command::new("tail").args(["-n", count]).arg(&path).output();
            let tail = test.run_at(remote, &["fs", "tail", "-n", count, file]).ok();
            assert!(tail.out == expected.unwrap().stdout, "{count}");
        }
        fs::write(test.there("no-break"), "a\nb").unwrap();
        let tail = test.run_at(remote, &["fs", "tail", "-n", "1", "no-break"]);
        assert_eq!(tail.ok().text(), "b");
        test.run_at(remote, &["fs", "tail", "missing"])
            .fails(1, &["missing"]);

        fs::write(&path, &lines).unwrap();
        let mut command = test.command(&["fs", "tail", "-f", "-n", "1", path.to_str().unwrap()]);
        if !remote {
            command.env_remove("EXEC_SERVER_URL");
        }
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut following = Running(command.spawn().unwrap());
        let mut printed = BufReader::new(following.0.stdout.take().unwrap()).lines();
        let mut next = || printed.next().unwrap().unwrap();
        assert_eq!(next(), "line 29999");
        let append = |text: &str| {
            let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        append("more\nand ");
        assert_eq!(next(), "more");
        append("more\n");
        assert_eq!(next(), "and more");
        // Rotated: the new file is printed from its beginning.
        fs::rename(&path, test.there("log.1")).unwrap();
        fs::write(&path, "rotated\n").unwrap();
        assert_eq!(next(), "rotated");
        append("after\n");
        assert_eq!(next(), "after");
    }
}

#[tokio::test]
async fn edit_replaces_the_file_only_with_what_was_edited() {
    let test = CliFixture::new().await;
    let path = test.there("app.conf");
    let temporary = test.here("tmp");
    fs::create_dir(&temporary).unwrap();
    let left = || fs::read_dir(&temporary).unwrap().count();
    let edit = |name: &str, editor: &str| {
        let mut command = test.command(&["fs", "edit", name]);
        command.env("TMPDIR", &temporary).env_remove("VISUAL");
        see(command.env("EDITOR", editor))
    };
    fs::write(&path, "one\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    // The editor has options, and sees the name and a private copy.
    edit(
        "app.conf",
        "sh -c 'stat -c %a \"$0\" \"${0%/*}\" >> \"$0\"; echo \"${0##*/}\" >> \"$0\"'",
    )
    .ok();
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        "one\n600\n700\napp.conf\n"
    );
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    edit("new", "sh -c 'echo made > \"$0\"'").ok();
    assert_eq!(fs::read_to_string(test.there("new")).unwrap(), "made\n");
    let same = edit("app.conf", "true");
    assert!(
        same.err.contains("unchanged") && same.code == Some(0),
        "{same:?}"
    );
    assert_eq!(left(), 0, "no copy is left");

    // What was edited is kept if it cannot be used.
    let failed = edit("app.conf", "sh -c 'echo kept > \"$0\"; exit 3'");
    failed.fails(1, &["unchanged", "the edited copy is `", "EDITOR"]);
    assert_eq!(left(), 1);
    let script = format!(
        "sh -c 'echo mine > \"$0\"; echo theirs > {}'",
        path.display()
    );
    edit("app.conf", &script).fails(1, &["was changed on the server", "the edited copy is `"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "theirs\n");
    assert_eq!(left(), 2);
    fs::create_dir(test.there("directory")).unwrap();
    edit("directory", "true").fails(1, &["directory"]);
    assert_eq!(left(), 2);
}
