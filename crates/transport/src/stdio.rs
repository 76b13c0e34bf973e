//! Links over standard input and output, of this process and of child processes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;

use tokio::net::unix::pipe;
use tokio::process::{Child, Command};

use crate::link::Link;

/// Opens a link over the standard input and output of this process.
///
/// Pipes are polled like sockets. Terminals and files share their flags with other programs, so a
/// helper thread reads and writes them instead.
///
/// # Errors
///
/// If the descriptors cannot be duplicated.
pub fn own() -> io::Result<Link> {
    let input = duplicate(rustix::stdio::stdin())?;
    let output = duplicate(rustix::stdio::stdout())?;
    Ok(match (is_pipe(&input), is_pipe(&output)) {
        (true, true) => Link::lines(
            pipe::Receiver::from_owned_fd(input)?,
            pipe::Sender::from_owned_fd(output)?,
        ),
        (true, false) => Link::lines(pipe::Receiver::from_owned_fd(input)?, tokio::io::stdout()),
        (false, true) => Link::lines(tokio::io::stdin(), pipe::Sender::from_owned_fd(output)?),
        (false, false) => Link::lines(tokio::io::stdin(), tokio::io::stdout()),
    })
}

fn duplicate(fd: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

fn is_pipe(fd: &OwnedFd) -> bool {
    rustix::fs::fstat(fd)
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_fifo())
}

/// Starts a program that speaks the protocol on its standard input and output.
///
/// The child exits when the link is dropped, and is killed when the returned handle is dropped.
///
/// # Errors
///
/// If the program cannot be started.
pub fn spawn(mut command: Command) -> io::Result<(Link, Child)> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let (Some(stdout), Some(stdin)) = (child.stdout.take(), child.stdin.take()) else {
        return Err(io::Error::other("child has no standard input or output"));
    };
    Ok((Link::lines(stdout, stdin), child))
}
