//! Implementation of `command/exec*`, the first protocol generation, on the same process code as
//! `process/*`.

use exec_server_engine::process::TerminationMethod;
use exec_server_protocol::command::{
    ExecParams, ExecResult, ExecTerminateParams, ExecTerminateResult, ExecWriteParams,
    ExecWriteResult,
};
use exec_server_protocol::process::WriteStatus;

use super::process::launch;
use crate::ApiError;
use crate::dispatch::CheckedRequest;
use crate::follow::NotificationFamily;
use crate::responder::RequestResponder;

pub(crate) fn exec(call: CheckedRequest<'_>, params: ExecParams) {
    let (info, start) = match call.connection.server.engine().prepare_command(params) {
        Ok(prepared) => prepared,
        Err(error) => return call.responder.send_error(error),
    };
    let result = ExecResult {
        process_id: info.process_id.clone(),
        running: true,
        exit_code: None,
        stdout: None,
        stderr: None,
    };
    launch(call, info, NotificationFamily::Command, start, |_| result);
}

pub(crate) fn write(call: CheckedRequest<'_>, params: ExecWriteParams) {
    let session = call.session;
    let ExecWriteParams { process_id, chunk } = params;
    let responder = call.responder;
    session.with_process(&process_id.clone(), move |managed| match managed {
        None => responder.send_error(ApiError::unknown_process(&process_id)),
        Some(managed) if !managed.process.has_terminal() => {
            let message = format!("stdin of process {process_id} is closed: it is not a tty");
            responder.send_error(ApiError::invalid_request(message));
        }
        Some(managed) => managed.write(chunk.0, None, responder, accepted),
    });
}

fn accepted(responder: RequestResponder, status: WriteStatus) {
    responder.send(match status {
        WriteStatus::Accepted => Ok(ExecWriteResult { accepted: true }),
        _ => Err(ApiError::invalid_request("the process has ended")),
    });
}

pub(crate) fn terminate(call: CheckedRequest<'_>, params: ExecTerminateParams) {
    let session = call.session;
    let responder = call.responder;
    session.with_process(&params.process_id, move |managed| {
        let running =
            managed.is_some_and(|managed| managed.process.terminate(TerminationMethod::Now));
        responder.send(Ok(ExecTerminateResult { running }));
    });
}
