//! `exec-server fs` and `exec-server cp` as a person or a script uses them: the built binary, its
//! streams and exit codes, locally and on a server.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod commands;
mod copies;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use exec_server::executor::log::OutputStream;
use exec_server::executor::{Executor, ExecutorConfig, ProcessSpec, PtySize, Stdio as ChildStdio};
use exec_server_testkit::proc::eventually;
use exec_server_testkit::server::ServerProcess;
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_exec-server");

/// A server, its directory, and a local directory.
struct CliFixture {
    server: ServerProcess,
    there: TempDir,
    here: TempDir,
}

/// Stdout, stderr and exit code.
#[derive(Debug)]
struct CommandOutput {
    out: Vec<u8>,
    err: String,
    code: Option<i32>,
}

impl CommandOutput {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    #[track_caller]
    fn fails(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {self:?}");
        }
        self
    }
}

/// A directory in memory with so many hard links of an empty file.
fn crowd(count: usize) -> TempDir {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let first = directory.path().join("000000");
    fs::write(&first, "").unwrap();
    for n in 1..count {
        fs::hard_link(&first, directory.path().join(format!("{n:06}"))).unwrap();
    }
    directory
}

impl CliFixture {
    async fn new() -> Self {
        let there = tempfile::tempdir().unwrap();
        let mut command = tokio::process::Command::new(BINARY);
        command.current_dir(there.path());
        Self {
            server: ServerProcess::start(command).await,
            there,
            here: tempfile::tempdir().unwrap(),
        }
    }

    fn there(&self, name: impl AsRef<Path>) -> PathBuf {
        self.there.path().canonicalize().unwrap().join(name)
    }

    fn here(&self, name: impl AsRef<Path>) -> PathBuf {
        self.here.path().canonicalize().unwrap().join(name)
    }

    /// The binary, started in the local directory with `EXEC_SERVER_URL` set.
    fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(BINARY);
        command
            .args(args)
            .current_dir(self.here.path())
            .env("EXEC_SERVER_URL", self.server.url())
            .stdin(Stdio::null());
        command
    }

    fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> CommandOutput {
        see(&mut self.command(args))
    }
}

fn see(command: &mut Command) -> CommandOutput {
    let output = command.output().unwrap();
    CommandOutput {
        out: output.stdout,
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code(),
    }
}

/// Bytes without repeated blocks.
fn pattern(len: usize) -> Vec<u8> {
    let piece: Vec<u8> = (0..65_521u32)
        .map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0])
        .collect();
    let mut data = Vec::with_capacity(len + piece.len() + 8);
    while data.len() < len {
        data.extend_from_slice(&data.len().to_be_bytes());
        data.extend_from_slice(&piece);
    }
    data.truncate(len);
    data
}

#[tokio::test]
async fn fs_commands_work_locally_and_on_a_server() {
    let test = CliFixture::new().await;
    // The same commands, with a server and without one.
    for (remote, directory) in [(true, test.there("")), (false, test.here(""))] {
        let run = |args: &[&str]| {
            let mut command = test.command(args);
            if !remote {
                command.env_remove("EXEC_SERVER_URL");
            }
            see(&mut command)
        };
        fs::write(directory.join("a"), "one\n").unwrap();
        fs::write(directory.join(".hidden"), "").unwrap();
        fs::create_dir(directory.join("d")).unwrap();
        symlink("nowhere", directory.join("l")).unwrap();
        assert_eq!(run(&["fs", "ls"]).ok().text(), "a\nd\nl\n");
        assert_eq!(run(&["fs", "ls", "-a"]).ok().text(), ".hidden\na\nd\nl\n");
        let long = run(&["fs", "ls", "-l"]).ok().text();
        assert!(
            long.lines().count() == 3 && long.contains("l -> nowhere"),
            "{long}"
        );
        let partly = run(&["fs", "ls", "missing", "a"]);
        assert!(partly.text().ends_with("a\n"), "{}", partly.text());
        partly.fails(1, &["cannot list `missing`"]);
        let json: serde_json::Value =
            serde_json::from_slice(&run(&["fs", "ls", "--json", "-l"]).ok().out).unwrap();
        assert_eq!(json[0]["name"], "a");
        assert_eq!(json[0]["metadata"]["size"], 4);
        assert_eq!(json[2]["kind"], "symlink");

        assert_eq!(run(&["fs", "cat", "a", "a"]).ok().text(), "one\none\n");
        run(&["fs", "cat", "missing", "a"]).fails(1, &["missing", "No such file"]);
        let stat: serde_json::Value =
            serde_json::from_slice(&run(&["fs", "stat", "--json", "a"]).ok().out).unwrap();
        assert_eq!(
            (&stat[0]["size"], &stat[0]["isFile"]),
            (&4.into(), &true.into())
        );
        let reported = run(&["fs", "stat", "a"]).ok().text();
        assert!(
            reported.contains("size  4 bytes") && reported.contains("kind  file"),
            "{reported}"
        );

        symlink(directory.join("d"), directory.join("d/self")).unwrap();
        let up = run(&["fs", "ls", "d/self/.."]).ok().text();
        assert_eq!(up, "a\nd\nl\n", "what is above where the link leads");
        fs::remove_file(directory.join("d/self")).unwrap();
        run(&["fs", "cp", "a", "b"]).ok();
        run(&["fs", "cp", "b", "d"]).ok();
        run(&["fs", "cp", "d", "e"]).fails(1, &["cannot copy `d`: it is a directory (use -r)"]);
        run(&["fs", "cp", "-r", "d", "e"]).ok();
        run(&["fs", "mv", "a", "b", "e"]).ok();
        run(&["fs", "mv", "-n", "e/a", "e/b"]).fails(1, &["already exists"]);
        run(&["fs", "mv", "e/a", "e/b", "missing"]).fails(1, &["not a directory"]);
        let walked = run(&["fs", "walk", "e"]).ok().text();
        let expected: String = ["a", "b"]
            .map(|name| format!("{}\n", directory.join("e").join(name).display()))
            .concat();
        assert_eq!(walked, expected);
        let walked = run(&["fs", "walk", "--json"]).ok();
        assert!(walked.text().contains("\"kind\": \"directory\""));

        run(&["fs", "rm", "d"]).fails(1, &["cannot remove `d`: it is a directory (use -r)"]);
        run(&["fs", "rm", "-r", "d", "l"]).ok();
        run(&["fs", "rm", "d"]).fails(1, &["`d`", "No such file"]);
        run(&["fs", "rm", "-rf", "d", "e", ".hidden"]).ok();
        assert_eq!(run(&["fs", "ls", "-a"]).ok().text(), "");
        assert_eq!(run(&["fs", "nonsense"]).code, Some(2));
    }
}

#[tokio::test]
async fn cp_chooses_the_same_targets_as_cp() {
    let test = CliFixture::new().await;
    fs::create_dir_all(test.here("tree/sub")).unwrap();
    fs::write(test.here("tree/sub/f"), "deep").unwrap();
    fs::write(test.here("a"), "one").unwrap();
    fs::write(test.here("b"), "two").unwrap();
    fs::create_dir(test.there("d")).unwrap();
    let absolute = format!("{}:{}", test.server.url(), test.there("named").display());
    for (args, expected) in [
        (vec!["cp", "a", ":"], "a"),
        (vec!["cp", "a", ":copy"], "copy"),
        (vec!["cp", "a", "b", ":d"], "d/b"),
        (vec!["cp", "a", absolute.as_str()], "named"),
        (vec!["cp", "-r", "tree", ":"], "tree/sub/f"),
        (vec!["cp", "-r", "tree", ":new"], "new/sub/f"),
        (vec!["cp", "-r", "tree", ":new"], "new/tree/sub/f"),
        (vec!["cp", "-r", "tree/.", ":d"], "d/sub/f"),
        (vec!["fs", "put", "b"], "b"),
        (vec!["fs", "put", "-q", "a", "b", "d"], "d/a"),
    ] {
        test.run(&args).ok();
        assert!(test.there(expected).is_file(), "{args:?}");
    }
    for (args, expected) in [
        (vec!["cp", ":a", "."], "a"),
        (vec!["cp", ":a", "back"], "back"),
        (vec!["cp", "-r", ":new", "."], "new/tree/sub/f"),
        (vec!["cp", "-r", ":new/.", "content"], "content/sub/f"),
        (vec!["fs", "get", "d/sub/f"], "f"),
        (vec!["fs", "get", "-r", "d", "d"], "d/sub/f"),
    ] {
        test.run(&args).ok();
        assert!(test.here(expected).is_file(), "{args:?}");
    }
    test.run(&["cp", "tree", ":"])
        .fails(1, &["cannot copy `tree`: it is a directory (use -r)"]);
    test.run(&["cp", "a", "b"]).fails(1, &["neither side"]);
    test.run(&["cp", ":a", ":b"]).ok();
    assert!(test.there("b").is_file());
    test.run(&["cp", "a", "b", ":nowhere"])
        .fails(1, &["not a directory"]);
    test.run(&["cp", "a", ":nowhere/"])
        .fails(1, &["not a directory"]);
    test.run(&["cp", "host:/a", "."]).fails(1, &["./host:/a"]);
    test.run(&["cp", "missing", ":"]).fails(1, &["missing"]);
    test.run(&["cp", ":missing", "."]).fails(1, &["missing"]);
    see(test
        .command(&["cp", "a", ":"])
        .env_remove("EXEC_SERVER_URL"))
    .fails(1, &["--url"]);
    assert_eq!(test.run(&["cp", "a"]).code, Some(2));
}

#[tokio::test]
async fn put_and_get_use_stdin_and_stdout() {
    let test = CliFixture::new().await;
    let data = pattern(3 << 20);
    let mut putting = test.command(&["fs", "put", "-", "stream"]);
    let mut putting = putting.stdin(Stdio::piped()).spawn().unwrap();
    putting.stdin.take().unwrap().write_all(&data).unwrap();
    assert!(putting.wait().unwrap().success());
    assert!(fs::read(test.there("stream")).unwrap() == data);
    assert!(test.run(&["fs", "get", "stream", "-"]).ok().out == data);
    test.run(&["fs", "put", "-"]).fails(1, &["one file"]);
    // A reader that closes early is no failure.
    let script = format!("{BINARY} fs cat stream | head -c 5 >/dev/null; exit ${{PIPESTATUS[0]}}");
    let mut head = Command::new("bash");
    head.args(["-c", &script])
        .env("EXEC_SERVER_URL", test.server.url());
    see(&mut head).ok();
}

#[tokio::test]
async fn cp_archive_keeps_modes_times_links_and_any_name() {
    let test = CliFixture::new().await;
    let names: [&[u8]; 6] = [
        b"plain",
        b"with space",
        b"new\nline",
        b"\xff\xfe",
        b"a:b",
        b"-dash",
    ];
    let source = test.here("tree");
    fs::create_dir_all(source.join("sub")).unwrap();
    for (number, name) in (1u32..).zip(names) {
        let path = source.join(OsStr::from_bytes(name));
        fs::write(&path, name).unwrap();
        let time = UNIX_EPOCH + Duration::from_millis(1_500_000_000_123 + u64::from(number));
        fs::File::open(&path).unwrap().set_modified(time).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + number)).unwrap();
    }
    symlink("../plain", source.join("sub/link")).unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(1_400_000_000);
    let sub = fs::File::open(source.join("sub")).unwrap();
    sub.set_modified(time).unwrap();
    fs::set_permissions(source.join("sub"), fs::Permissions::from_mode(0o700)).unwrap();

    test.run(&["cp", "-a", "tree", ":copy"]).ok();
    test.run(&["cp", "-a", ":copy", "back"]).ok();
    let marks = |path: &Path| {
        let found = fs::symlink_metadata(path).unwrap();
        (found.mode(), found.mtime(), found.mtime_nsec())
    };
    for root in [test.there("copy"), test.here("back")] {
        for name in names {
            let name = OsStr::from_bytes(name);
            assert_eq!(fs::read(root.join(name)).unwrap(), name.as_bytes());
            assert_eq!(
                marks(&root.join(name)),
                marks(&source.join(name)),
                "{name:?}"
            );
        }
        assert_eq!(marks(&root.join("sub")), marks(&source.join("sub")));
        let link = fs::read_link(root.join("sub/link")).unwrap();
        assert_eq!(link, Path::new("../plain"));
    }
    // The paths are separate arguments, as a shell passes them.
    for name in names {
        let mut argument = OsString::from(":copy/");
        argument.push(OsStr::from_bytes(name));
        fs::create_dir_all(test.here("single")).unwrap();
        test.run(&[OsStr::new("cp"), &argument, OsStr::new("single")])
            .ok();
        let copy = test.here("single").join(OsStr::from_bytes(name));
        assert_eq!(fs::read(copy).unwrap(), name);
    }
    let listed = test.run(&["fs", "ls", "copy"]).ok().out;
    assert_eq!(
        listed,
        b"-dash\na:b\nnew\nline\nplain\nsub\nwith space\n\xff\xfe\n"
    );
}

#[tokio::test]
async fn cp_names_failed_files_and_copies_the_rest() {
    let test = CliFixture::new().await;
    fs::create_dir(test.here("tree")).unwrap();
    for number in 0..50 {
        fs::write(test.here(format!("tree/{number}")), "x").unwrap();
    }
    let _socket = std::os::unix::net::UnixListener::bind(test.here("tree/socket")).unwrap();
    fs::create_dir_all(test.there("tree/7/x")).unwrap();
    test.run(&["cp", "-r", "tree", ":"])
        .fails(1, &["tree/socket", "tree/7", "2 could not be copied"]);
    assert_eq!(fs::read_dir(test.there("tree")).unwrap().count(), 50);
    assert_eq!(fs::read(test.there("tree/49")).unwrap(), b"x");
}

#[tokio::test]
async fn cp_resumes_an_interrupted_upload() {
    let test = CliFixture::new().await;
    let data = pattern(192 << 20);
    fs::write(test.here("image"), &data).unwrap();
    fs::write(test.there("image"), "old").unwrap();
    let part = test.there(".image.exec-server-part");

    let mut cut = test.command(&["cp", "image", ":"]).spawn().unwrap();
    eventually("a beginning", || match fs::metadata(&part) {
        Ok(found) if found.len() > 8 << 20 => Ok(()),
        found => Err(format!("{found:?}")),
    })
    .await;
    cut.kill().unwrap();
    cut.wait().unwrap();
    assert_eq!(fs::read(test.there("image")).unwrap(), b"old");
    // The server may still write data that it has received.
    let mut length = 0;
    eventually("a part that no longer grows", || {
        let before = std::mem::replace(&mut length, fs::metadata(&part).unwrap().len());
        if before == length {
            Ok(())
        } else {
            Err(before)
        }
    })
    .await;
    assert!(length < data.len() as u64, "the cut came too late");

    // The partial file is older than the file that is sent now.
    let before = fs::metadata(&part).unwrap().ino();
    test.run(&["cp", "image", ":"]).ok();
    assert!(fs::read(test.there("image")).unwrap() == data);
    assert_eq!(
        fs::metadata(test.there("image")).unwrap().ino(),
        before,
        "the upload was resumed"
    );
    assert!(!part.exists());

    // The same for a download, with a partial file that has other content.
    fs::write(test.here(".image.exec-server-part"), pattern(1000)).unwrap();
    fs::remove_file(test.here("image")).unwrap();
    test.run(&["cp", ":image", "."]).ok();
    assert!(fs::read(test.here("image")).unwrap() == data);
    assert!(!test.here(".image.exec-server-part").exists());
}

/// The output of a command in a terminal with this many columns.
async fn in_terminal(test: &CliFixture, args: &[&str], cols: u16) -> String {
    let executor = Executor::new(ExecutorConfig::default()).unwrap();
    let mut argv = vec![BINARY.to_owned()];
    argv.extend(args.iter().map(|&arg| arg.to_owned()));
    let env = [("EXEC_SERVER_URL", test.server.url()), ("TERM", "xterm")];
    let spec = ProcessSpec {
        argv,
        cwd: test.here(""),
        env: env
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        stdio: ChildStdio::Terminal(PtySize { rows: 24, cols }),
        ..ProcessSpec::default()
    };
    let process = executor.start(spec).await.unwrap();
    let closed = process.wait_for(|log| log.close().map(|_| log.exit().cloned()));
    let exit = tokio::time::timeout(Duration::from_secs(60), closed).await;
    let shown = process
        .with_log(|log| log.cut(OutputStream::Pty, None))
        .bytes;
    let shown = String::from_utf8(shown.to_vec()).unwrap();
    assert_eq!(exit.unwrap().unwrap().code, 0, "{shown}");
    shown
}

#[tokio::test]
async fn cp_shows_progress_on_a_terminal() {
    /// Erases the previous line.
    const ERASE: &str = "\r\x1b[K";
    let test = CliFixture::new().await;
    let name = "image\x1b[31m";
    fs::write(test.here(name), pattern(16 << 20)).unwrap();
    for (args, target) in [
        (["cp", name, ":up"], test.there("up")),
        (["cp", ":up", "down"], test.here("down")),
    ] {
        let shown = in_terminal(&test, &args, 200).await;
        assert_eq!(fs::read(target).unwrap().len(), 16 << 20);
        // The progress line is erased at the end.
        let lines = shown
            .strip_suffix(ERASE)
            .and_then(|s| s.strip_prefix(ERASE));
        let lines = lines.unwrap_or_else(|| panic!("{shown:?}"));
        for line in lines.split(ERASE) {
            assert!(line.starts_with('[') && !line.contains('\x1b'), "{shown:?}");
            for part in ["%", "/1 files", "/16.0 MiB", " left  "] {
                assert!(line.contains(part), "no {part:?} in {line:?}");
            }
        }
        let narrow = in_terminal(&test, &args, 30).await;
        let mut lines = narrow.split(ERASE);
        assert!(lines.all(|line| line.chars().count() < 30), "{narrow:?}");
        assert!(narrow.contains("%"), "{narrow:?}");
    }
    assert_eq!(in_terminal(&test, &["cp", "-q", name, ":up"], 80).await, "");
    // Without a terminal no progress is shown.
    test.run(&["cp", name, ":up"]).ok();
}

#[tokio::test]
async fn fs_search_prints_lines_like_grep() {
    let test = CliFixture::new().await;
    fs::write(test.there("a.rs"), "one\ntwo needle\nthree\n").unwrap();
    fs::write(test.there("b.txt"), "needle\n").unwrap();
    let line = |name: &str, rest: &str| format!("{}{rest}\n", test.there(name).display());
    let found = test.run(&["fs", "search", "need.e"]).ok().text();
    let expected = line("a.rs", ":2:two needle") + &line("b.txt", ":1:needle");
    assert_eq!(found, expected);
    let found = test.run(&["fs", "search", "-g", "*.rs", "-C", "1", "needle"]);
    let expected =
        line("a.rs", "-1-one") + &line("a.rs", ":2:two needle") + &line("a.rs", "-3-three");
    assert_eq!(found.ok().text(), expected);
    let found = test
        .run(&["fs", "search", "--json", "-i", "NEEDLE", "b.txt"])
        .ok();
    let json: serde_json::Value = serde_json::from_slice(&found.out).unwrap();
    assert_eq!(json["matches"][0]["line"], 1);
    test.run(&["fs", "search", "nothing"]).fails(1, &[]);
    test.run(&["fs", "search", "("]).fails(2, &["pattern"]);
    test.run(&["fs", "search", "x", "missing"])
        .fails(2, &["missing"]);
}

#[tokio::test]
async fn fs_watch_prints_changes() {
    let test = CliFixture::new().await;
    let mut watching = test
        .command(&["fs", "watch", "--ignore", "*.log"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut printed = BufReader::new(watching.stderr.take().unwrap()).lines();
    assert!(printed.next().unwrap().unwrap().starts_with("watching "));
    fs::write(test.there("x.log"), "").unwrap();
    fs::write(test.there("new file"), "").unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert_eq!(
        line,
        format!("created   {}", test.there("new file").display())
    );
    // The command ends when its output is closed.
    drop(lines);
    fs::write(test.there("another"), "").unwrap();
    let mut number = 0;
    let ended = eventually("the end of the watch", || {
        number += 1;
        fs::write(test.there("another"), number.to_string()).unwrap();
        match watching.try_wait().unwrap() {
            Some(status) => Ok(status),
            None => Err("it still runs"),
        }
    })
    .await;
    assert!(ended.success(), "{ended}");
    test.run(&["fs", "watch", "missing"]).fails(1, &["missing"]);
}

#[tokio::test]
async fn fs_help_has_examples_and_explanations() {
    let test = CliFixture::new().await;
    for (args, words) in [
        (&["cp", "--help"][..], &["ws://", "./NAME", "-part"][..]),
        (&["fs", "--help"], &["EXEC_SERVER_URL", "relative"]),
        (&["fs", "search", "--help"], &["Exit codes"]),
        (&["fs", "put", "--help"], &["Examples"]),
    ] {
        let help = test.run(args).ok().text();
        for word in words {
            assert!(help.contains(word), "no {word:?} in {help}");
        }
    }
}

#[tokio::test]
async fn ls_and_walk_list_directories_of_any_size() {
    let test = CliFixture::new().await;
    let crowd = crowd(120_000);
    let path = crowd.path().to_str().unwrap();
    let expected: String = (0..120_000).map(|n| format!("{n:06}\n")).collect();
    for remote in [true, false] {
        let run = |args: &[&str]| {
            let mut command = test.command(args);
            if !remote {
                command.env_remove("EXEC_SERVER_URL");
            }
            see(&mut command)
        };
        let listed = run(&["fs", "ls", path]).ok().text();
        assert!(listed == expected, "{} bytes", listed.len());
        let walked = run(&["fs", "walk", "--entries", "200000", path]).ok();
        assert_eq!(walked.text().lines().count(), 120_000);
        let part = run(&["fs", "walk", "--entries", "60000", path]);
        assert_eq!(part.text().lines().count(), 60_000);
        assert!(
            part.err.contains("not all entries are listed"),
            "{}",
            part.err
        );
    }
}

#[tokio::test]
async fn cp_copies_directories_larger_than_one_response() {
    let test = CliFixture::new().await;
    let crowd = tempfile::tempdir_in("/dev/shm").unwrap();
    for n in 0..50_010 {
        symlink("nowhere", crowd.path().join(format!("{n:05}"))).unwrap();
    }
    let to = tempfile::tempdir_in("/dev/shm").unwrap();
    let from = format!(":{}", crowd.path().display());
    let target = to.path().join("copy");
    test.run(&["cp", "-r", &from, target.to_str().unwrap()])
        .ok();
    let copied: Vec<_> = fs::read_dir(&target).unwrap().collect();
    assert_eq!(copied.len(), 50_010);
    let last = fs::read_link(target.join("50009")).unwrap();
    assert_eq!(last, Path::new("nowhere"));
}
