//! One test for each kind of object: after many of them, as many bytes are allocated as before.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use exec_server::fs::{
    AccessOptions, ReadDirectoryOptions, ReadStreamOptions, SearchOptions, TreeWalkOptions,
    WatchOptions, WriteMode, WriteStreamOptions, uri,
};
use exec_server::protocol::process::{
    Condition, Delivery, SignalName, SignalScope, StartParams, TerminateMode, WaitUntil,
};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecServer, ExecServerClient, ExecutorFileSystem as _,
    Listener, RemoteExecServerConnectArgs, SessionLifetime, WaitForRequest, in_process,
};

use super::{TIMEOUT, config, eventually, live_bytes, serially, served};

/// What one object may leave behind on average, in bytes: tables that grow in steps. A leaked record
/// of a process uses some thousand bytes, the smallest leak that was ever found 600.
const PER_OBJECT_BYTES: usize = 250;

/// Batches of objects after the warm-up. In each, a buffer of some KiB may be allocated or freed by
/// chance; a leak is in all of them.
const BATCHES: usize = 8;

/// Runs `object` in batches of `count`: one to warm up, then until live bytes do not grow in two of
/// at most [`BATCHES`] batches.
///
/// # Panics
///
/// If live bytes grow in all batches but one.
pub(super) async fn leaves_nothing(count: usize, mut object: impl AsyncFnMut(usize)) {
    for number in 0..count {
        object(number).await;
    }
    let mut before = settled_bytes().await;
    let mut grown = Vec::new();
    let mut passed = 0;
    for batch in 1..=BATCHES {
        for number in batch * count..(batch + 1) * count {
            object(number).await;
        }
        let now = settled_bytes().await;
        grown.push(now as isize - before as isize);
        passed += usize::from(now <= before + PER_OBJECT_BYTES * count);
        if passed == 2 {
            return;
        }
        before = now;
    }
    panic!("live bytes grow in batches of {count} objects, by {grown:?}");
}

/// Live bytes when no more are freed: records have expired and tasks have ended.
async fn settled_bytes() -> usize {
    /// Longer than the time between two steps of freeing: records expire 100 ms after their end, at
    /// intervals of 50 ms.
    const QUIET: Duration = Duration::from_millis(400);
    let mut least = live_bytes();
    let mut since = tokio::time::Instant::now();
    while since.elapsed() < QUIET {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let now = live_bytes();
        if now < least {
            (least, since) = (now, tokio::time::Instant::now());
        }
    }
    least
}

/// Waits until the clients of a server have no objects.
pub(super) async fn no_objects_are_left(server: &ExecServer) {
    eventually("no objects are left", || {
        let left: Vec<_> = server.live_objects().into_iter().collect();
        let none = left.iter().all(|(_, count)| *count == 0);
        none.then_some(()).ok_or(left)
    })
    .await;
}

/// Parameters of a shell script with a process id made from `number`.
pub(super) fn sh(number: usize, script: &str) -> StartParams {
    StartParams {
        process_id: format!("p{number}"),
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
        ..StartParams::default()
    }
}

/// Runs a process whose output occupies as many read buffers at one time as are kept for reuse
/// (16 of 64 KiB). Otherwise their number depends on how many processes overlap, and grows when more
/// of them do by chance.
pub(super) async fn fill_reused_buffers(server: &ExecServer, client: &ExecServerClient) {
    let params = sh(usize::MAX, "head -c 3000000 /dev/zero");
    let process = client.start(params).await.unwrap().process;
    let output = process.output(CollectOptions::default()).await.unwrap();
    assert_eq!(output.stdout.len(), 3_000_000);
    drop(process);
    no_output_is_retained(server).await;
}

async fn no_output_is_retained(server: &ExecServer) {
    eventually("no output is retained", || {
        match server.executor().retained_bytes() {
            0 => Ok(()),
            bytes => Err(bytes),
        }
    })
    .await;
}

/// Starts processes that write 300 kB each and reads them to their end.
async fn processes_leave_nothing(change: impl Fn(&mut StartParams)) {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    fill_reused_buffers(&server, &client).await;
    leaves_nothing(30, async |number| {
        let mut params = sh(number, "head -c 300000 /dev/zero");
        change(&mut params);
        let process = client.start(params).await.unwrap().process;
        let options = CollectOptions::default();
        let output = process.output(options).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 0);
    })
    .await;
    no_output_is_retained(&server).await;
}

#[tokio::test]
async fn processes_with_pipes_leave_no_memory() {
    processes_leave_nothing(|_| ()).await;
}

/// The cheapest process: its record is all that it can leave.
#[tokio::test]
async fn processes_without_output_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    leaves_nothing(300, async |number| {
        let mut params = sh(number, "");
        params.argv = vec!["/bin/true".to_owned()];
        let process = client.start(params).await.unwrap().process;
        let output = process.output(CollectOptions::default()).await.unwrap();
        assert_eq!(output.exit.unwrap().exit_code, 0);
    })
    .await;
    no_output_is_retained(&server).await;
}

#[tokio::test]
async fn processes_with_a_terminal_leave_no_memory() {
    processes_leave_nothing(|params| params.tty = true).await;
}

#[tokio::test]
async fn processes_with_pull_delivery_leave_no_memory() {
    processes_leave_nothing(|params| params.delivery = Some(Delivery::Pull)).await;
}

#[tokio::test]
async fn processes_with_input_that_is_never_read_leave_no_memory() {
    let _one = serially().await;
    let (_server, client) = served(config()).await;
    leaves_nothing(20, async |number| {
        let params = StartParams {
            pipe_stdin: true,
            ..sh(number, "sleep 600")
        };
        let process = client.start(params).await.unwrap().process;
        let write = process.write(Bytes::from(vec![0; 100_000]));
        write.await.unwrap();
        let ended = process.terminate(TerminateMode::Force, true);
        assert_eq!(ended.await.unwrap().gone, Some(true));
    })
    .await;
}

#[tokio::test]
async fn processes_of_a_client_that_reads_nothing_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    fill_reused_buffers(&server, &client).await;
    leaves_nothing(20, async |number| {
        let params = sh(number, "head -c 100000 /dev/zero");
        let process = client.start(params).await.unwrap().process;
        let wait = process.wait(WaitUntil::Exited, None);
        assert_eq!(wait.await.unwrap().exit_code, Some(0));
    })
    .await;
    drop(client);
    drop(server);
}

#[tokio::test]
async fn waits_that_time_out_leave_no_memory() {
    let _one = serially().await;
    let (server, client) = served(config()).await;
    let params = sh(0, "trap '' INT; sleep 600");
    let process = client.start(params).await.unwrap().process;
    leaves_nothing(50, async |_| {
        let short = Some(Duration::from_millis(1));
        let wait = process.wait(WaitUntil::Closed, short).await.unwrap();
        assert!(wait.wait_timed_out);
        let request = WaitForRequest {
            any: vec![Condition::Regex {
                regex: "never".to_owned(),
                stream: None,
            }],
            timeout: short,
            ..WaitForRequest::default()
        };
        process.wait_for(request).await.unwrap();
        let sent = process.signal(SignalName::Interrupt, SignalScope::Group);
        sent.await.unwrap();
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn sessions_leave_no_memory() {
    let _one = serially().await;
    let server = ExecServer::new(config()).unwrap();
    leaves_nothing(30, async |number| {
        let client = in_process(&server).await.unwrap();
        let process = client.start(sh(number, "sleep 600")).await.unwrap().process;
        drop(process);
        client.end_session().await.unwrap();
        drop(client);
    })
    .await;
    eventually("sessions end", || match server.session_count() {
        0 => Ok(()),
        count => Err(count),
    })
    .await;
}

/// A detached session uses one task per disconnect, not one for the whole grace period.
#[tokio::test]
async fn cuts_of_one_session_leave_no_memory() {
    let _one = serially().await;
    let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), false)
        .await
        .unwrap();
    let url = listener.url().to_string();
    let server = ExecServer::new(config()).unwrap();
    tokio::spawn(listener.serve(server.clone()));
    let connect = async |resume: Option<String>| {
        let mut args = RemoteExecServerConnectArgs::new(url.clone(), "test");
        args.options.resume_session_id = resume;
        args.options.detach_grace = Some(Duration::from_secs(3600));
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            match ExecServerClient::connect(args.clone()).await {
                Ok(client) => return client,
                // The server may not have noticed the end of the connection before.
                Err(error) if deadline > tokio::time::Instant::now() => drop(error),
                Err(error) => panic!("cannot resume: {error}"),
            }
        }
    };
    let first = connect(None).await;
    let session = first.session_id().to_owned();
    drop(first);
    leaves_nothing(50, async |_| {
        let client = connect(Some(session.clone())).await;
        client.list().await.unwrap();
        drop(client);
    })
    .await;
    assert_eq!(server.session_count(), 1);
}

#[tokio::test]
async fn connections_without_a_handshake_leave_no_memory() {
    let _one = serially().await;
    let server = ExecServer::new(config()).unwrap();
    leaves_nothing(100, async |number| {
        let (here, there) = exec_server::transport::Link::pair();
        let served = server.serve(there, format!("peer {number}"), SessionLifetime::Connection);
        drop(here);
        served.await;
    })
    .await;
}

#[tokio::test]
async fn open_files_and_streams_leave_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    let path = uri(directory.path().join("file")).unwrap();
    let (server, client) = served(config()).await;
    let files = client.file_system();
    leaves_nothing(30, async |_| {
        let options = WriteStreamOptions {
            mode: WriteMode::Replace,
            ..WriteStreamOptions::default()
        };
        let mut writer = files.open_write(&path, options).await.unwrap();
        let chunk = Bytes::from(vec![7; 200_000]);
        writer.write_chunk(chunk.clone()).await.unwrap();
        writer.commit().await.unwrap();
        let mut reader = files
            .open_read(&path, ReadStreamOptions::default())
            .await
            .unwrap();
        let read = reader.next_chunk().await.unwrap().unwrap();
        assert_eq!(read[..], chunk[..read.len()]);
        // The body is dropped before its end.
        drop(reader);
        let whole = files
            .read_file(&path, AccessOptions::default())
            .await
            .unwrap();
        assert_eq!(whole, chunk);
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn a_file_that_is_sent_in_pieces_to_a_peer_that_leaves_holds_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, vec![7; 8 << 20]).unwrap();
    let path = path.display();
    let server = ExecServer::new(config()).unwrap();
    leaves_nothing(20, async |number| {
        let (mut here, there) = exec_server::transport::Link::pair();
        let name = format!("peer {number}");
        let served = tokio::spawn(server.serve(there, name, SessionLifetime::Connection));
        for text in [
            r#"{"id":1,"method":"initialize","params":{"clientName":"x"}}"#.to_owned(),
            r#"{"method":"initialized"}"#.to_owned(),
            format!(r#"{{"id":2,"method":"fs/readFile","params":{{"path":"file://{path}"}}}}"#),
        ] {
            here.outgoing
                .push_message(text.len(), |out| out.extend_from_slice(text.as_bytes()));
        }
        here.outgoing.flush().await.unwrap();
        while server.held_bytes().0 == 0 {
            tokio::task::yield_now().await;
        }
        drop(here);
        served.await.unwrap();
    })
    .await;
    eventually("memory for answers is given back", || {
        match server.held_bytes() {
            (0, 0) => Ok(()),
            held => Err(held),
        }
    })
    .await;
}

#[tokio::test]
async fn watches_of_files_leave_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    for number in 0..20 {
        std::fs::create_dir(directory.path().join(number.to_string())).unwrap();
    }
    let path = uri(directory.path()).unwrap();
    let (server, client) = served(config()).await;
    let files = client.file_system();
    leaves_nothing(30, async |number| {
        let options = WatchOptions {
            recursive: true,
            ..WatchOptions::default()
        };
        let mut changes = files.watch(&path, options).await.unwrap();
        let file = directory.path().join("3").join("changed");
        std::fs::write(&file, number.to_string()).unwrap();
        changes.recv().await.unwrap();
        std::fs::remove_file(&file).unwrap();
    })
    .await;
    no_objects_are_left(&server).await;
}

#[tokio::test]
async fn listings_and_searches_leave_no_memory() {
    let _one = serially().await;
    let directory = tempfile::tempdir().unwrap();
    for number in 0..50 {
        let file = directory.path().join(format!("file{number}"));
        std::fs::write(file, "some needle in it\n").unwrap();
    }
    let path = uri(directory.path()).unwrap();
    let (_server, client) = served(config()).await;
    let files = client.file_system();
    leaves_nothing(30, async |_| {
        let entries = files
            .read_directory(&path, ReadDirectoryOptions::default())
            .await
            .unwrap();
        assert_eq!(entries.len(), 50);
        let found = files
            .search(&path, "needle", SearchOptions::default())
            .await
            .unwrap();
        assert_eq!(found.matches.len(), 50);
        let walked = files.walk(&path, TreeWalkOptions::default()).await.unwrap();
        assert_eq!(walked.entries.len(), 50);
    })
    .await;
}

/// The check itself: the smallest leak that it must find.
#[tokio::test]
#[should_panic(expected = "live bytes grow in batches of 30 objects")]
async fn leak_of_500_bytes_per_object_is_found() {
    let _one = serially().await;
    leaves_nothing(30, async |_| std::mem::forget(vec![0_u8; 500])).await;
}
