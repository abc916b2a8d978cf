echo Paris >answer.txt
