// Package demo is a small business that uses taskrelay through its public API: a shop that takes payments, pays
// refunds through three channels, and opens accounts at a bank.
//
// The outside world (payment gateway, refund channels, bank) are HTTP servers inside the process that misbehave by
// a seeded script: they fail, hang, book and then lose the answer, and the bank is down for a while. The business
// writes its own rows and its tasks in one transaction, rolls some back, and sends some tasks twice. At the end the
// books of both sides are compared, and every task, call, attempt and dead letter is accounted for.
package demo
